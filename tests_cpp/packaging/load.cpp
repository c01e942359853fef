// load [LIBRARY...]: opens liblltm with dlopen, resolves all symbols and prints the last library's
// version. Without arguments, prints the version of the liblltm that it was linked with, which it
// does not call.
#include <dlfcn.h>

#include <cstdio>

int main(int, char** arguments) {
  void* library = dlopen(nullptr, RTLD_NOW);
  while (*++arguments != nullptr && library != nullptr) {
    library = dlopen(*arguments, RTLD_NOW | RTLD_LOCAL);
  }
  void* version = library == nullptr ? nullptr : dlsym(library, "_ZN4lltm7versionEv");
  if (version == nullptr) {
    std::puts(dlerror());
    return 1;
  }
  std::puts(reinterpret_cast<const char* (*)()>(version)());
  return 0;
}
