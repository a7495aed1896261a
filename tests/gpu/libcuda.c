/* A stand-in of NVIDIA's driver library, libcuda.so.1: it has no GPU. Each process that begins CUDA
   appends a line to the file that STAND_IN_CUDA_LOG names: its number. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int cuInit(unsigned flags) {
  const char *path = getenv("STAND_IN_CUDA_LOG");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (file) {
    fprintf(file, "%d\n", getpid());
    fclose(file);
  }
  return 100; /* CUDA_ERROR_NO_DEVICE */
}

int cuDriverGetVersion(int *version) { return *version = 13000, 0; }

int cuGetProcAddress_v2(const char *name, void **at, int version, unsigned long flags, int *status) {
  static const struct { const char *name; void *function; } known[] = {
      {"cuInit", cuInit},
      {"cuDriverGetVersion", cuDriverGetVersion},
      {"cuGetProcAddress", cuGetProcAddress_v2},
  };
  *at = NULL;
  for (unsigned number = 0; number < sizeof known / sizeof *known; number++)
    if (!strcmp(name, known[number].name)) *at = known[number].function;
  return *at ? 0 : 500; /* CUDA_ERROR_NOT_FOUND */
}
