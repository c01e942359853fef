// load LIBRARY...: liblltm by dlopen, with every symbol that it needs; the version of the last.
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
