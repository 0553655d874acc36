// The part of gpu_on_host.h that is the same for all kernels.
#include "gpu_on_host.h"

[[noreturn]] void fail(const char* what) { std::fprintf(stderr, "broken: %s\n", what), std::abort(); }

// ThreadSanitizer would wait a second for the threads of a program that ends.
extern "C" const char* __tsan_default_options() { return "atexit_sleep_ms=0"; }

// Threads, and what they wait for.

Thread main_thread, *self = &main_thread;
static Thread *first_ready, *last_ready;  // of a list
static Thread* sleeping[256];             // lists by the word that is awaited
static Fiber idle[1 << 14];               // made ahead, or of threads that are done: to make one takes a millisecond
static int idle_fibers;
constexpr std::size_t STACK = 1 << 18;

UNSEEN static void make_ready(Thread* one, bool next) {
  if (!first_ready) first_ready = last_ready = one, one->next = nullptr;
  else if (next) one->next = first_ready, first_ready = one;
  else last_ready = last_ready->next = one, one->next = nullptr;
}
UNSEEN static void next_turn() {
  CHECK(first_ready);  // or all threads wait for each other
  Thread* before = self;
  self = first_ready, first_ready = self->next;
  if (self == before) return;
  __tsan_switch_to_fiber(self->fiber.of_sanitizer, __tsan_switch_to_fiber_no_sync);
  swapcontext(&before->context, &self->context);
}
UNSEEN void yield() { make_ready(self, false), next_turn(); }

UNSEEN static Thread** sleeping_until(const void* word) {
  return &sleeping[(reinterpret_cast<u64>(word) / 4 * 2654435761u >> 8) % 256];
}
UNSEEN void sleep_until_woken(const void* word) {
  Thread** list = sleeping_until(word);
  self->awaited = word, self->next = *list, *list = self;
  next_turn();
}
UNSEEN void wake(const void* word) {
  for (Thread** one = sleeping_until(word); Thread* woken = *one;) {
    if (woken->awaited == word) *one = woken->next, make_ready(woken, draw() % 2);
    else one = &woken->next;
  }
}

UNSEEN static void run() {
  __tsan_acquire(self);
  self->body();
  self->done = true, wake(&self->done);
  __tsan_release(self), next_turn();
}
UNSEEN static void keep(Fiber fiber) { idle[idle_fibers++] = fiber; }
static void make_fiber() {
  void* stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  keep({__tsan_create_fiber(0), stack});
}
UNSEEN static Fiber fiber() {
  if (idle_fibers == 0) make_fiber();
  return idle[--idle_fibers];
}
UNSEEN void start(Thread& one, std::function<void()> body) {
  one.body = std::move(body), one.fiber = fiber();
  getcontext(&one.context);
  one.context.uc_stack.ss_sp = one.fiber.stack, one.context.uc_stack.ss_size = STACK;
  makecontext(&one.context, run, 0), __tsan_release(&one), make_ready(&one, false);
}
UNSEEN void join(Thread& one) {
  while (!one.done) sleep_until_woken(&one.done);
  __tsan_acquire(&one), keep(one.fiber);
}

UNSEEN void Barrier::wait(int threads, bool orders_memory) {
  const int now = generation;
  if (orders_memory) __tsan_release(&arrived);
  if (++arrived == threads) {
    if (orders_memory) __tsan_acquire(&arrived), __tsan_release(&generation);
    arrived = 0, ++generation, wake(this);
  }
  while (generation == now) sleep_until_woken(this);
  if (orders_memory) __tsan_acquire(&generation);
}

Block::Block(int rank, int threads, int bytes) : bytes(bytes), rank(rank), warps(threads / 32) {
  shared = static_cast<char*>(std::aligned_alloc(1024, (bytes + 1023) / 1024 * 1024));
  std::memset(shared, 0xff, bytes);  // NaN
}
Block::~Block() { std::free(shared); }

// Shared memory.

UNSEEN u32 shared_address(const void* p) {
  const i64 offset = static_cast<const char*>(p) - self->block->shared;
  CHECK(offset >= 0 && offset <= self->block->bytes);
  return u32(self->block->rank) << RANK | u32(offset);
}
UNSEEN char* remote_memory(u32 address, int size) {
  Block& of = *self->group->by_rank[address >> RANK];
  const int offset = address & ((1 << RANK) - 1);
  CHECK(offset + size <= of.bytes && offset % size == 0);
  return of.shared + offset;
}
UNSEEN char* own_memory(u32 address, int size) {
  CHECK(int(address >> RANK) == self->block->rank);
  return remote_memory(address, size);
}

// Several threads may make the same copy, so these do not race with each other.
static void perform(const Copy& copy) {
  for (int i = 0; i < copy.bytes / 4; i++)
    __atomic_store_n(own<u32>(copy.to + 4 * i), copy.from ? copy.from[i] : 0, __ATOMIC_RELAXED);
}
void copy_now_or_later(const Copy& copy) {
  if (draw() % 2) perform(copy);
  else self->open_copies.push_back(copy);
}
void copy_commit() { self->committed.push_back(std::exchange(self->open_copies, {})); }
void copy_wait_until(int pending) {
  for (; self->committed.size() > pending; self->committed.pop_front())
    for (const Copy& copy : self->committed.front()) perform(copy);
}
void complete_copies() { copy_commit(), copy_wait_until(0); }

// Launches.

// Runs `blocks` blocks, `together` at the same time.
static void launch(void (*kernel)(const i64*), int blocks, int together, int threads, int shared_bytes, const i64* arguments) {
  for (int first = 0; first < blocks; first += together) {
    std::vector<Thread> running(together * threads);
    Group all;
    std::vector<Block*> by_rank;
    for (int rank = 0; rank < together; rank++) by_rank.push_back(&all.blocks.emplace_back(rank, threads, shared_bytes));
    all.by_rank = by_rank.data(), all.threads = together * threads;
    for (int n = 0; n < all.threads; n++) {
      Thread& one = running[n];
      const unsigned i = n % threads, rank = n / threads;
      one.index = {i}, one.block_index = {first + rank};
      one.grid_size = {unsigned(blocks)}, one.block_size = {unsigned(threads)};
      one.group = &all, one.block = by_rank[rank], one.warp = &one.block->warps[i / 32];
      one.chance = 2654435761u * (one.block_index.x * threads + i + 1) | 1;
      start(one, [=] { kernel(arguments); });
      dawdle();  // so that the last blocks start long after the first
    }
    for (Thread& one : running) join(one);
  }
}

// The file holds a launch: how many blocks, how many of them together, threads and bytes of shared memory; then buffers, a
// number and each one's size and bytes; then arguments, a number and for each the buffer (-1: none) and a number, which is
// the argument or an offset into the buffer. Buffers are written back.
static int launch_from(const char* name, void (*kernel)(const i64* arguments)) {
  std::FILE* file = std::fopen(name, "r+b");
  auto number = [&] {
    i64 value = 0;
    CHECK(std::fread(&value, 8, 1, file) == 1);
    return value;
  };
  const int blocks = number(), together = number(), threads = number(), shared_bytes = number();
  std::vector<std::pair<char*, i64>> buffers(number());
  for (auto& [bytes, size] : buffers) {
    size = number(), bytes = static_cast<char*>(std::aligned_alloc(256, (size + 255) / 256 * 256));
    CHECK(i64(std::fread(bytes, 1, size, file)) == size);
  }
  std::vector<i64> arguments(number());
  for (i64& argument : arguments) {
    const i64 buffer = number(), value = number();
    argument = buffer < 0 ? value : reinterpret_cast<i64>(buffers[buffer].first) + value;
  }
  launch(kernel, blocks, together, threads, shared_bytes, arguments.data());
  std::rewind(file);
  for (auto& [bytes, size] : buffers) std::fwrite(bytes, 1, size, file), std::free(bytes);
  return std::fclose(file);
}

// Reads launches (a number of threads, and the paths of a library with a function `kernel` and of a file), and prints the
// exit status of the process that ran each of them. It is a fork of this process, which has made fibers ahead: the
// sanitizer clears a megabyte for each. Messages go to <file>.log.
int main() {
  constexpr int MOST = 512;  // fibers that are made ahead
  main_thread.fiber.of_sanitizer = __tsan_get_current_fiber();
  int threads;
  char library[4096], file[4096];
  while (std::scanf(" %d %4095[^\n] %4095[^\n]", &threads, library, file) == 3) {
    while (idle_fibers < min(threads, MOST)) make_fiber();
    const pid_t child = _Fork();  // fork() would let the sanitizer look away in the child
    if (child == 0) {
      CHECK(std::freopen((std::string(file) + ".log").c_str(), "w", stderr));
      void* loaded = dlopen(library, RTLD_NOW);
      if (!loaded) fail(dlerror());
      std::exit(launch_from(file, reinterpret_cast<void (*)(const i64*)>(dlsym(loaded, "kernel"))));
    }
    int status;
    waitpid(child, &status, 0);
    std::printf("%d\n", status), std::fflush(stdout);
  }
}
