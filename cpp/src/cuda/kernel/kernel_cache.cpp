#include "cuda/kernel/kernel_cache.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <random>
#include <string_view>
#include <system_error>
#include <utility>

namespace lltm::cuda {
namespace {

// FNV-1a of 128 bits. A cryptographic hash is not needed: only trusted files are read.
__extension__ using Digest = unsigned __int128;

constexpr Digest kDigestOfNothing = (Digest{0x6c62272e07bb0142} << 64) | 0x62b821756295c58d;

Digest extended(Digest digest, std::string_view text) {
  constexpr Digest kPrime = (Digest{1} << 88) + 0x13b;
  for (const char byte : text) digest = (digest ^ static_cast<unsigned char>(byte)) * kPrime;
  return digest;
}

struct Descriptor {
  const int number;

  explicit Descriptor(int opened) : number(opened) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
};

// ---- folder -------------------------------------------------------------------

std::string find_folder() {
  if (const char* const chosen = ::secure_getenv("LLTM_CACHE_DIR")) return chosen;
  for (const auto& [variable, folder] :
       {std::pair("XDG_CACHE_HOME", "/lltm"), std::pair("HOME", "/.cache/lltm")}) {
    const char* const value = ::secure_getenv(variable);
    if (value != nullptr && value[0] == '/') return std::string(value) + folder;
  }
  return {};
}

int open_folder(const std::string& path) {
  for (std::size_t end = 0; end != std::string::npos;) {
    end = path.find('/', end + 1);
    if (::mkdir(path.substr(0, end).c_str(), S_IRWXU) != 0 && errno != EEXIST) return -1;
  }
  return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

// The path may contain symbolic links: the check and all accesses use the opened folder.
struct Folder {
  const std::string path = find_folder();
  const Descriptor opened{path.starts_with('/') ? open_folder(path) : -1};
  std::string why_not;

  Folder() {
    struct stat status = {};
    if (path.empty()) {
      why_not = "LLTM_CACHE_DIR is empty, or there is no HOME";
    } else if (path[0] != '/') {
      why_not = path + ": not an absolute path";
    } else if (opened.number < 0 || ::fstat(opened.number, &status) != 0) {
      why_not = path + ": " + std::generic_category().message(errno);
    } else if (
        (status.st_uid != ::geteuid() && status.st_uid != 0) ||
        (status.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
      why_not = path + ": another user owns it or may write to it";
    }
  }
};

// ---- files: named by the digest of their key ----------------------------------
//
// A file contains the digest of the key and code together, then the code.

std::string name_of(Digest key) {
  return std::to_string(static_cast<std::uint64_t>(key >> 64)) + "-" +
         std::to_string(static_cast<std::uint64_t>(key)) + ".lltm";
}

// Returns "" if the file is not complete or has another key.
std::string load(int folder, const std::string& name, Digest key) {
  const Descriptor file(::openat(folder, name.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status = {};
  if (::fstat(file.number, &status) != 0) return {};
  std::string bytes(static_cast<std::size_t>(status.st_size), '\0');
  const ssize_t size = ::read(file.number, bytes.data(), bytes.size());
  Digest digest = 0;
  if (size != std::ssize(bytes) || bytes.size() < sizeof(Digest)) return {};
  std::memcpy(&digest, bytes.data(), sizeof(Digest));
  bytes.erase(0, sizeof(Digest));
  return digest == extended(key, bytes) ? bytes : std::string();
}

// Readers see either no file or the complete file. After a power failure, the digest is wrong.
void store(int folder, const std::string& name, Digest key, const std::string& code) {
  const std::string temporary = name + "." + std::to_string(std::random_device()());
  const Descriptor file(
      ::openat(
          folder, temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR));
  const Digest digest = extended(key, code);
  const std::string bytes =
      std::string(reinterpret_cast<const char*>(&digest), sizeof(Digest)) + code;
  if (::write(file.number, bytes.data(), bytes.size()) != std::ssize(bytes) ||
      ::renameat(folder, temporary.c_str(), folder, name.c_str()) != 0) {
    ::unlinkat(folder, temporary.c_str(), 0);
  }
}

}  // namespace

std::string cached(
    const std::string& key, const std::function<std::string()>& compile, bool replace) {
  const Folder folder;
  if (!folder.why_not.empty()) return compile();
  const Digest digest = extended(kDigestOfNothing, key);
  std::string code = replace ? "" : load(folder.opened.number, name_of(digest), digest);
  if (code.empty()) {
    code = compile();
    store(folder.opened.number, name_of(digest), digest, code);
  }
  return code;
}

std::string describe_kernel_cache() {
  const Folder folder;
  return folder.why_not.empty() ? folder.path : "none (" + folder.why_not + ")";
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
  const Digest digest = extended(kDigestOfNothing, key);
  return folder.empty() ? "" : load(AT_FDCWD, folder + '/' + name_of(digest), digest);
}

}  // namespace lltm::cuda
