// load LIBRARY...: opens liblltm with dlopen, resolves all symbols and prints the last library's
// version.
#include <dlfcn.h>

#include <cstdio>

int main(int, char** arguments) {
  void* library = nullptr;
  while (*++arguments != nullptr) library = dlopen(*arguments, RTLD_NOW | RTLD_LOCAL);
  void* version = library == nullptr ? nullptr : dlsym(library, "_ZN4lltm7versionEv");
  if (version == nullptr) {
    std::puts(dlerror());
    return 1;
  }
  std::puts(reinterpret_cast<const char* (*)()>(version)());
  return 0;
}
