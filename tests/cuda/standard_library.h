// The system headers of gpu_on_host.h, which host_kernel.py precompiles: they are most of what a kernel's program reads.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <list>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>
