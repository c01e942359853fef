// Plugin for qemu-user: instructions of the emulated program. Its system call 5000, which Linux
// does not have, writes the instructions since the last such call to the file of the option `out`.
//
// Declares the parts of qemu-plugin.h that it uses: Debian's package has no header.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

struct tb;  // a block of translated code
typedef void OnTranslation(uint64_t id, struct tb* block);
typedef void OnCall(
    uint64_t,
    unsigned,
    int64_t number,
    uint64_t,
    uint64_t,
    uint64_t,
    uint64_t,
    uint64_t,
    uint64_t,
    uint64_t,
    uint64_t);
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, OnTranslation*);
void qemu_plugin_register_vcpu_syscall_cb(uint64_t id, OnCall*);
void qemu_plugin_register_vcpu_tb_exec_inline(struct tb*, int add, uint64_t* sum, uint64_t value);
size_t qemu_plugin_tb_n_insns(const struct tb*);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;
static uint64_t instructions;
static char out[1000];

static void translated(uint64_t id, struct tb* block) {
  (void)id;
  qemu_plugin_register_vcpu_tb_exec_inline(block, 0, &instructions, qemu_plugin_tb_n_insns(block));
}

static void called(
    uint64_t id,
    unsigned cpu,
    int64_t number,
    uint64_t a,
    uint64_t b,
    uint64_t c,
    uint64_t d,
    uint64_t e,
    uint64_t f,
    uint64_t g,
    uint64_t h) {
  (void)id, (void)cpu, (void)a, (void)b, (void)c, (void)d, (void)e, (void)f, (void)g, (void)h;
  if (number != 5000) return;
  FILE* const file = fopen(out, "w");
  if (file == NULL) return;
  fprintf(file, "%" PRIu64 "\n", instructions);
  fclose(file);
  instructions = 0;
}

__attribute__((visibility("default"))) int qemu_plugin_install(
    uint64_t id, const void* info, int argc, char** argv) {
  (void)info;
  if (argc != 1 || strncmp(argv[0], "out=", 4) != 0) return 1;
  strncpy(out, argv[0] + 4, sizeof(out) - 1);
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_vcpu_syscall_cb(id, called);
  return 0;
}
