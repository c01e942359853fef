#include "cuda/kernel/kernel_cache.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <memory>
#include <string_view>
#include <system_error>
#include <utility>

namespace lltm::cuda {
namespace {

// Temporary files have it too: a process may have ended before it renamed its file.
constexpr std::string_view kSuffix = ".lltm";

struct Close {
  void operator()(DIR* folder) const { ::closedir(folder); }
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using OpenFolder = std::unique_ptr<DIR, Close>;
using OpenFile = std::unique_ptr<std::FILE, Close>;

// ---- digest -------------------------------------------------------------------

// FNV-1a of 128 bits. A cryptographic hash is not needed: only trusted files are read.
__extension__ using Digest = unsigned __int128;

constexpr Digest kDigestOfNothing = (Digest{0x6c62272e07bb0142} << 64) | 0x62b821756295c58d;

Digest extended(Digest digest, std::string_view text) {
  constexpr Digest kPrime = (Digest{1} << 88) + 0x13b;
  for (const char byte : text) digest = (digest ^ static_cast<unsigned char>(byte)) * kPrime;
  return digest;
}

std::string hexadecimal(Digest digest) {
  std::string digits;
  for (; digits.size() < 2 * sizeof(Digest); digest >>= 4) {
    digits += "0123456789abcdef"[static_cast<unsigned>(digest) & 15];
  }
  return digits;
}

// ---- folder -------------------------------------------------------------------

// Returns "" if a variable is not an absolute path.
std::string path_in(const char* variable) {
  const char* const value = ::secure_getenv(variable);
  return value != nullptr && value[0] == '/' ? value : "";
}

std::string home() {
  if (std::string path = path_in("HOME"); !path.empty()) return path;
  std::array<char, 16384> buffer;
  passwd entry = {};
  passwd* found = nullptr;
  ::getpwuid_r(::geteuid(), &entry, buffer.data(), buffer.size(), &found);
  return found == nullptr || found->pw_dir == nullptr ? "" : found->pw_dir;
}

// Only the user, or root, could have written it.
bool is_trusted(const struct stat& status) {
  return (status.st_uid == ::geteuid() || status.st_uid == 0) &&
         (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

// The path may contain symbolic links: the checks and all accesses use the opened folder.
struct Folder {
  std::string why_not;
  std::string path = find();
  OpenFolder folder{open()};

  Folder() {
    struct stat status = {};
    if (!why_not.empty()) return;
    if (folder == nullptr || ::fstat(::dirfd(folder.get()), &status) != 0) {
      why_not = path + ": " + std::generic_category().message(errno);
    } else if (!is_trusted(status)) {
      why_not = path + ": another user owns it or may write to it";
    }
  }

 private:
  std::string find() {
    if (const char* const chosen = ::secure_getenv("LLTM_CACHE_DIR")) {
      if (chosen[0] == '\0') why_not = "LLTM_CACHE_DIR is empty";
      return chosen;
    }
    if (const std::string caches = path_in("XDG_CACHE_HOME"); !caches.empty()) {
      return caches + "/lltm";
    }
    const std::string user = home();
    if (user.empty()) why_not = "no home folder";
    return user + "/.cache/lltm";
  }

  DIR* open() const {
    if (!why_not.empty()) return nullptr;
    for (std::size_t end = 0; end != std::string::npos;) {
      end = path.find('/', end + 1);
      if (::mkdir(path.substr(0, end).c_str(), S_IRWXU) != 0 && errno != EEXIST) return nullptr;
    }
    return ::opendir(path.c_str());
  }
};

// ---- files: named by the digest of their key ----------------------------------
//
// A file contains the digest of the key and code together, then the code.

OpenFile open_file(int folder, const std::string& name, int flags) {
  const int file =
      ::openat(folder, name.c_str(), flags | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR);
  return OpenFile(file < 0 ? nullptr : ::fdopen(file, (flags & O_CREAT) != 0 ? "w" : "r"));
}

std::string name_of(Digest key) {
  return hexadecimal(key) + std::string(kSuffix);
}

// Returns "" if the file is not complete or has another key.
std::string read(std::FILE* file, off_t size, Digest key) {
  if (size <= static_cast<off_t>(sizeof(Digest))) return {};
  Digest digest = 0;
  std::string code(static_cast<std::size_t>(size) - sizeof(Digest), '\0');
  const bool complete = std::fread(&digest, sizeof(Digest), 1, file) == 1 &&
                        std::fread(code.data(), code.size(), 1, file) == 1;
  return complete && digest == extended(key, code) ? code : std::string();
}

std::string load(int folder, const std::string& name, Digest key, std::int64_t most_bytes) {
  // Opening a FIFO would wait.
  const OpenFile file = open_file(folder, name, O_RDONLY | O_NONBLOCK);
  struct stat status = {};
  if (file == nullptr || ::fstat(::fileno(file.get()), &status) != 0 || !S_ISREG(status.st_mode) ||
      !is_trusted(status) || status.st_size > most_bytes) {
    return {};
  }
  std::string code = read(file.get(), status.st_size, key);
  ::futimens(::fileno(file.get()), nullptr);  // for remove_least_recent
  return code;
}

// Readers see either no file or the complete file. After a power failure, the digest is wrong.
bool store(int folder, const std::string& name, Digest key, const std::string& code) {
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  const std::string temporary =
      name + "." + std::to_string(::getpid()) + "." + std::to_string(now) + std::string(kSuffix);
  OpenFile file = open_file(folder, temporary, O_WRONLY | O_CREAT | O_EXCL);
  if (file == nullptr) return false;
  const Digest digest = extended(key, code);
  bool stored = std::fwrite(&digest, sizeof(Digest), 1, file.get()) == 1 &&
                std::fwrite(code.data(), code.size(), 1, file.get()) == 1;
  stored = std::fclose(file.release()) == 0 && stored &&
           ::renameat(folder, temporary.c_str(), folder, name.c_str()) == 0;
  if (!stored) ::unlinkat(folder, temporary.c_str(), 0);
  return stored;
}

void remove_least_recent(DIR* folder, std::int64_t most_bytes) {
  // By time of use.
  std::multimap<std::pair<std::time_t, long>, std::pair<std::string, std::int64_t>> files;
  std::int64_t total = 0;
  while (const dirent* const entry = ::readdir(folder)) {
    struct stat status = {};
    if (!std::string_view(entry->d_name).ends_with(kSuffix) ||
        ::fstatat(::dirfd(folder), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0) {
      continue;
    }
    const std::pair used = {status.st_mtim.tv_sec, status.st_mtim.tv_nsec};
    files.insert({used, {entry->d_name, status.st_size}});
    total += status.st_size;
  }
  for (const auto& [used, file] : files) {
    if (total <= most_bytes) return;
    ::unlinkat(::dirfd(folder), file.first.c_str(), 0);
    total -= file.second;
  }
}

}  // namespace

std::string cached(
    const std::string& key, const std::function<std::string()>& compile, std::int64_t most_bytes) {
  const Folder cache;
  if (!cache.why_not.empty()) return compile();
  const int folder = ::dirfd(cache.folder.get());
  const Digest digest = extended(kDigestOfNothing, key);
  const std::string name = name_of(digest);
  std::string code = load(folder, name, digest, most_bytes);
  if (!code.empty()) return code;
  code = compile();
  if (!code.empty() && store(folder, name, digest, code)) {
    remove_least_recent(cache.folder.get(), most_bytes);
  }
  return code;
}

std::string describe_kernel_cache() {
  const Folder cache;
  return cache.why_not.empty() ? cache.path : "none (" + cache.why_not + ")";
}

std::string embedded_folder() {
  Dl_info library = {};
  ::dladdr(reinterpret_cast<const void*>(&embedded_folder), &library);
  const std::string path = library.dli_fname;
  std::string folder = path.substr(0, path.rfind('/') + 1) + "lltm-kernels";
  return ::access(folder.c_str(), X_OK) == 0 ? folder : "";
}

// Trusted as the library is, which the same user installed.
std::string embedded(const std::string& key) {
  const std::string folder = embedded_folder();
  if (folder.empty()) return {};
  const Digest digest = extended(kDigestOfNothing, key);
  const OpenFile file(std::fopen((folder + '/' + name_of(digest)).c_str(), "rb"));
  struct stat status = {};
  if (file == nullptr || ::fstat(::fileno(file.get()), &status) != 0) return {};
  return read(file.get(), status.st_size, digest);
}

}  // namespace lltm::cuda
