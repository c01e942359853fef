// A time series from a CSV file: a header line with names, then a row of numbers for each
// time. Cells are separated by commas; quotes have no meaning.
#pragma once

#include <string>
#include <vector>

namespace forecast {

struct Series {
  std::vector<std::string> columns;
  std::vector<double> values;  // row by row
};

// Reads the given columns. With none given, all, but a first column of dates (ISO 8601).
// Throws std::runtime_error, naming file and line, for anything but finite numbers.
Series read_csv(const std::string& path, const std::vector<std::string>& columns);

// The cells of a line, without the white space around them.
std::vector<std::string> split(const std::string& line);
std::string join(const std::vector<std::string>& cells);

}  // namespace forecast
