/* A stand-in of NVIDIA's management library, libnvidia-ml.so.1, which the real pynvml loads. The
   environment says how many GPUs there are, whether GPU 0 is divided (MIG), and who uses them:
   STAND_IN_GPUS=2 STAND_IN_MIG=1 STAND_IN_USERS="0:PID:BYTES 1:PID:BYTES". Each GPU has 80 GiB. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
enum { UUID_SIZE = 80 };
typedef struct { unsigned index; char uuid[UUID_SIZE]; } Device;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_part, compute_part; } User;

static Device devices[64], part = {0, "MIG-00000000-0000-0000-0000-000000000000"};

static unsigned count(void) {
  const char *said = getenv("STAND_IN_GPUS");
  return said ? (unsigned)atoi(said) : 0;
}

static unsigned is_divided(void) { return getenv("STAND_IN_MIG") != NULL; }

int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *number) { return *number = count(), SUCCESS; }
const char *nvmlErrorString(int result) { return result == NOT_FOUND ? "Not Found" : "Error"; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
  if (index >= count()) return INVALID_ARGUMENT;
  *device = &devices[index];
  (*device)->index = index;
  snprintf((*device)->uuid, UUID_SIZE, "GPU-%08u-0000-0000-0000-000000000000", index);
  return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
  if (is_divided() && !strcmp(uuid, part.uuid)) return *device = &part, SUCCESS;
  for (unsigned index = 0; index < count(); index++)
    if (!nvmlDeviceGetHandleByIndex_v2(index, device) && !strcmp(uuid, (*device)->uuid))
      return SUCCESS;
  return NOT_FOUND;
}

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned size) {
  return snprintf(uuid, size, "%s", device->uuid), SUCCESS;
}

int nvmlDeviceGetName(Device *device, char *name, unsigned size) {
  return snprintf(name, size, "Stand-in GPU"), SUCCESS;
}

int nvmlDeviceGetMigMode(Device *device, unsigned *now, unsigned *later) {
  *now = *later = is_divided() && device->index == 0;
  return SUCCESS;
}

static unsigned users_of(Device *device, User *users, unsigned most, unsigned long long *used) {
  unsigned found = 0;
  const char *at = getenv("STAND_IN_USERS");
  for (*used = 0; at && *at; at = strchr(at, ' ') ? strchr(at, ' ') + 1 : NULL) {
    unsigned index;
    User user = {0, 0, ~0u, ~0u};
    if (sscanf(at, "%u:%u:%llu", &index, &user.pid, &user.used) != 3) break;
    if (index != device->index || device == &part) continue;
    if (found < most) users[found] = user;
    *used += user.used;
    found++;
  }
  return found;
}

int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
  unsigned long long used;
  users_of(device, NULL, 0, &used);
  memory->total = 80ull << 30;
  memory->used = used;
  memory->free = memory->total - used;
  return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *most, User *users) {
  unsigned long long used;
  unsigned room = users ? *most : 0;
  *most = users_of(device, users, room, &used);
  return *most > room ? INSUFFICIENT_SIZE : SUCCESS;
}
