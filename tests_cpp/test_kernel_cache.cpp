// The files of compiled kernels. test_nvrtc.cpp tests their keys.
#include "cuda/kernel/kernel_cache.h"

#include <gtest/gtest.h>

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace lltm::cuda {
namespace {

namespace fs = std::filesystem;

std::string code_of(const std::string& key) {
  return "code of " + key + std::string(1000, '\0');
}
constexpr int kFileBytes = 16 + 9 + 1000;  // digest, code of a key of one character

void set(const char* variable, const std::string& value) {
  ::setenv(variable, value.c_str(), /*overwrite=*/1);
}

struct KernelCache : testing::Test {
  std::string name = testing::TempDir() + "kernel_cache_XXXXXX";
  const fs::path base = ::mkdtemp(name.data()), folder = base / "some" / "folder";

  KernelCache() { set("LLTM_CACHE_DIR", folder); }
  ~KernelCache() override {
    ::unsetenv("LLTM_CACHE_DIR");
    fs::remove_all(base);
  }

  // Returns the number of compilations.
  static int get(const std::string& key) {
    int compilations = 0;
    const auto compile = [&] {
      ++compilations;
      return code_of(key);
    };
    EXPECT_EQ(cached(key, compile), code_of(key));
    return compilations;
  }
  std::vector<fs::path> files() const {
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
    return files;
  }
};

int mode(const fs::path& path) {
  struct stat status = {};
  ::lstat(path.c_str(), &status);
  return static_cast<int>(status.st_mode) & 07777;
}

TEST_F(KernelCache, CompilesEachKeyOnce) {
  EXPECT_THROW(cached("a", []() -> std::string { throw std::logic_error(""); }), std::logic_error);
  for (const char* key : {"a", "b", "ab", ""}) EXPECT_EQ(get(key), 1) << key;
  for (const char* key : {"a", "b", "ab", ""}) EXPECT_EQ(get(key), 0) << key;
  ASSERT_EQ(files().size(), 4);
  EXPECT_EQ(mode(files()[0]), 0600);
  EXPECT_EQ(mode(folder), 0700);
  EXPECT_EQ(mode(folder.parent_path()), 0700);
  fs::rename(folder, base / "moved");
  fs::create_directory_symlink(base / "moved", folder);
  EXPECT_EQ(get("a"), 0);
}

TEST_F(KernelCache, ReplacesDamagedFiles) {
  get("a");
  const fs::path file = files().at(0);
  ASSERT_EQ(fs::file_size(file), kFileBytes);
  const auto expect_replaced = [](const std::string& damage) {
    EXPECT_EQ(get("a"), 1) << damage;
    EXPECT_EQ(get("a"), 0) << damage;
  };
  for (const int bytes : {0, 15, 16, 17, kFileBytes - 1, kFileBytes + 1}) {
    fs::resize_file(file, bytes);
    expect_replaced("size " + std::to_string(bytes));
  }
  for (const int at : {0, 15, 16, kFileBytes - 1}) {
    std::fstream stream(file);
    const int byte = stream.seekg(at).get();
    stream.seekp(at).put(static_cast<char>(byte ^ 1));
    stream.close();
    expect_replaced("bit flip at " + std::to_string(at));
  }
  fs::remove(file);
  get("b");
  fs::rename(files().at(0), file);
  expect_replaced("another key");
}

TEST_F(KernelCache, OnlyCostsCompilationsIfTheFolderIsNotUsed) {
  const auto expect_none = [](const std::string& why_not) {
    for (int i = 0; i < 2; ++i) EXPECT_EQ(get("a"), 1) << why_not;
    EXPECT_EQ(describe_kernel_cache(), "none (" + why_not + ")");
  };
  EXPECT_EQ(describe_kernel_cache(), folder);  // creates it
  const std::string unsafe = folder.string() + ": another user owns it or may write to it";
  for (const int bits : {0720, 0702}) {
    ::chmod(folder.c_str(), bits);
    expect_none(unsafe);
  }
  if (::geteuid() == 0) {
    ::chmod(folder.c_str(), 0700);
    ASSERT_EQ(::chown(folder.c_str(), 12345, 0), 0);
    expect_none(unsafe);
  }
  EXPECT_TRUE(files().empty());
  std::ofstream(base / "file") << "text";
  for (const fs::path& path : {base / "file", base / "file" / "folder"}) {
    set("LLTM_CACHE_DIR", path);
    expect_none(path.string() + ": Not a directory");
  }
  set("LLTM_CACHE_DIR", "relative/folder");
  expect_none("relative/folder: not an absolute path");
  EXPECT_FALSE(fs::exists("relative"));
  set("LLTM_CACHE_DIR", "");
  expect_none("LLTM_CACHE_DIR is empty, or there is no HOME");
}

TEST_F(KernelCache, OnlyCostsCompilationsIfTheDiskIsFull) {
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before = {};
  ::getrlimit(RLIMIT_FSIZE, &before);
  for (const rlim_t bytes : {0, 10, kFileBytes - 1}) {
    const rlimit small = {bytes, before.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &small);
    for (int i = 0; i < 2; ++i) EXPECT_EQ(get("a"), 1) << bytes;
    ::setrlimit(RLIMIT_FSIZE, &before);
    EXPECT_TRUE(files().empty()) << bytes;
  }
  std::signal(SIGXFSZ, handler);
}

TEST_F(KernelCache, ProcessesMayFillItConcurrently) {
  constexpr int kKeys = 100;
  const auto get_all = [] {
    int compilations = 0;
    for (int i = 0; i < kKeys; ++i) compilations += get(std::to_string(i));
    return compilations;
  };
  std::vector<pid_t> children(3);
  for (pid_t& child : children) {
    child = ::fork();
    if (child != 0) continue;
    for (int round = 0; round < 5; ++round) {
      get_all();
      for (const fs::path& file : files()) ::unlink(file.c_str());
    }
    ::_exit(HasFailure() ? 1 : 0);
  }
  for (const pid_t child : children) {
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  get_all();
  EXPECT_EQ(get_all(), 0);
  EXPECT_EQ(files().size(), kKeys);  // no temporary files
}

TEST_F(KernelCache, TheEnvironmentSelectsTheFolder) {
  const char* const before = std::getenv("HOME");
  const std::string home = before == nullptr ? "" : before;
  set("HOME", base);
  ::unsetenv("LLTM_CACHE_DIR");
  set("XDG_CACHE_HOME", base / "caches");
  EXPECT_EQ(describe_kernel_cache(), base / "caches" / "lltm");
  set("XDG_CACHE_HOME", "relative");
  EXPECT_EQ(describe_kernel_cache(), base / ".cache" / "lltm");
  ::unsetenv("XDG_CACHE_HOME");
  EXPECT_EQ(describe_kernel_cache(), base / ".cache" / "lltm");
  set("HOME", home);
}

}  // namespace
}  // namespace lltm::cuda
