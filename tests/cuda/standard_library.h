// The system headers of gpu_on_host.h, which host_kernel.py precompiles: they are most of what a kernel's program reads.
#pragma once
#include <sanitizer/tsan_interface.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>
