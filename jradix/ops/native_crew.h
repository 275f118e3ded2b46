// A call's work on the calling thread and on idle threads of XLA's pool, whoever comes first.
//
// A helper that the pool starts late, or never while the caller waits, must not be waited for: it finds the crew
// closed, and the last one who holds the crew frees it.
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#include "xla/ffi/api/c_api.h"

typedef struct {
  void (*work)(void *);                    // takes items until there are none; may be called by several threads
  void *job;                               // read while the crew is open only
  pthread_mutex_t mutex;
  pthread_cond_t idle;
  int references, active, is_closed;       // under the mutex
} Crew;

enum { AWAKE_TURNS = 3000 };               // 50 to 150 us: about what it takes to sleep and be woken

static int64_t limit(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

static void destroy_error(const XLA_FFI_Api *api, XLA_FFI_Error *error) {
  XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  api->XLA_FFI_Error_Destroy(&args);
}

static int64_t num_threads(const XLA_FFI_CallFrame *frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, frame->ctx,
                                             &threads};
  XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_NumThreads(&args);
  if (!error) return threads;
  destroy_error(frame->api, error);        // a backend without a pool
  return 1;
}

static void release(Crew *crew) {  // with the mutex held
  int is_last = --crew->references == 0;
  pthread_mutex_unlock(&crew->mutex);
  if (!is_last) return;
  pthread_mutex_destroy(&crew->mutex);
  pthread_cond_destroy(&crew->idle);
  free(crew);
}

static void help(void *data) {
  Crew *crew = data;
  pthread_mutex_lock(&crew->mutex);
  if (!crew->is_closed) {
    __atomic_add_fetch(&crew->active, 1, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&crew->mutex);
    crew->work(crew->job);
    pthread_mutex_lock(&crew->mutex);
    if (__atomic_sub_fetch(&crew->active, 1, __ATOMIC_RELEASE) == 0) pthread_cond_signal(&crew->idle);
  }
  release(crew);
}

static void wait_awake(const int *active) {
  for (int i = 0; i < AWAKE_TURNS && __atomic_load_n(active, __ATOMIC_ACQUIRE); i++) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
  }
}

// Calls `work(job)` here and on up to `helpers` other threads, and returns when all of them have returned.
static void run_crew(const XLA_FFI_CallFrame *frame, void (*work)(void *), void *job, int64_t helpers) {
  Crew *crew = helpers > 0 ? calloc(1, sizeof *crew) : NULL;
  if (!crew) {
    work(job);
    return;
  }
  crew->work = work;
  crew->job = job;
  crew->references = 1;
  pthread_mutex_init(&crew->mutex, NULL);
  pthread_cond_init(&crew->idle, NULL);
  for (int64_t i = 0; i < helpers; i++) {
    XLA_FFI_ThreadPool_Schedule_Args args = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, frame->ctx, help,
                                             crew};
    pthread_mutex_lock(&crew->mutex);
    crew->references++;
    pthread_mutex_unlock(&crew->mutex);
    XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_Schedule(&args);
    if (!error) continue;
    destroy_error(frame->api, error);
    pthread_mutex_lock(&crew->mutex);
    crew->references--;
    pthread_mutex_unlock(&crew->mutex);
    break;
  }
  work(job);
  pthread_mutex_lock(&crew->mutex);
  crew->is_closed = 1;
  pthread_mutex_unlock(&crew->mutex);
  wait_awake(&crew->active);               // helpers are at their last items
  pthread_mutex_lock(&crew->mutex);
  while (crew->active) pthread_cond_wait(&crew->idle, &crew->mutex);
  release(crew);
}
