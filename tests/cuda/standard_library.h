// The system headers of gpu_on_host.h, which host_kernel.py precompiles: they are most of what a kernel's program reads.
#pragma once
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>
