#include "csv.h"

#include "error.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <fstream>
#include <numeric>
#include <optional>
#include <stdexcept>

namespace forecast {
namespace {

constexpr const char* kSpace = " \t\r";

std::optional<double> number(const std::string& cell) {
  double value = 0;
  const char* const end = cell.data() + cell.size();
  const auto [stopped, error] = std::from_chars(cell.data(), end, value);
  if (error != std::errc() || stopped != end || !std::isfinite(value)) return std::nullopt;
  return value;
}

// 2026-11, 2026-11-22, 2026-11-22 14:00
bool is_date(const std::string& cell) {
  return cell.size() >= 7 && cell.find_first_not_of("0123456789") == 4 && cell[4] == '-';
}

// Where the columns to read are in a row.
std::vector<size_t> places_of(
    const std::vector<std::string>& columns,
    const std::vector<std::string>& header,
    const std::vector<std::string>& first_row,
    const std::string& place) {
  const size_t dates = is_date(first_row.front()) ? 1 : 0;
  std::vector<size_t> found(columns.empty() ? header.size() - dates : columns.size());
  std::iota(found.begin(), found.end(), dates);
  for (size_t k = 0; k < columns.size(); ++k) {
    const auto column = std::find(header.begin(), header.end(), columns[k]);
    if (column == header.end()) fail(place, "a column " + columns[k], "none");
    found[k] = static_cast<size_t>(column - header.begin());
  }
  for (const size_t k : found) {
    const std::string& name = header[k];
    const std::string column = place + ", column " + std::to_string(k + 1);
    // A number: the file has no header, and this is its first row.
    if (name.empty() || number(name)) fail(column, "a name", name);
    if (std::count(header.begin(), header.end(), name) > 1) {
      fail(column, "a name of its own", name);
    }
  }
  return found;
}

}  // namespace

std::vector<std::string> split(const std::string& line) {
  std::vector<std::string> cells;
  for (size_t start = 0; start <= line.size();) {
    const size_t comma = std::min(line.find(',', start), line.size());
    std::string cell = line.substr(start, comma - start);
    cell.erase(0, cell.find_first_not_of(kSpace));
    cell.erase(cell.find_last_not_of(kSpace) + 1);
    cells.push_back(cell);
    start = comma + 1;
  }
  return cells;
}

std::string join(const std::vector<std::string>& cells) {
  std::string line;
  for (const std::string& cell : cells) line += (line.empty() ? "" : ",") + cell;
  return line;
}

Series read_csv(const std::string& path, const std::vector<std::string>& columns) {
  errno = 0;
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  if (line.starts_with("\xef\xbb\xbf")) line.erase(0, 3);  // a byte order mark
  const std::vector<std::string> header = split(line);

  Series series;
  std::vector<size_t> chosen;
  for (size_t line_number = 2; std::getline(file, line); ++line_number) {
    const std::string place = path + ", line " + std::to_string(line_number);
    const std::vector<std::string> row = split(line);
    if (row.size() != header.size()) {
      const std::string expected = std::to_string(header.size()) + " cells, as in the header";
      fail(place, expected, std::to_string(row.size()));
    }
    if (line_number == 2) {
      chosen = places_of(columns, header, row, path + ", line 1");
      for (const size_t k : chosen) series.columns.push_back(header[k]);
    }
    for (const size_t k : chosen) {
      const std::optional<double> value = number(row[k]);
      if (!value) fail(place + ", column " + header[k], "a finite number", row[k]);
      series.values.push_back(*value);
    }
  }
  if (!file.eof()) throw std::runtime_error(path + ": cannot read: " + std::strerror(errno));
  if (series.values.empty()) fail(path, "a header and rows of numbers", "none");
  return series;
}

}  // namespace forecast
