from benchmarks.counters import parse

# Shortened output of ncu 2025.3 with --csv --page=raw --print-units=base.
OUTPUT = """==PROF== Connected to process 4711
"ID","Process ID","Kernel Name","Stream","dram__bytes.sum","lts__t_bytes.sum"
"","","","","byte","byte"
"0","4711","flashrnn_forward","7","126,877,696","251,658,240"
"1","4711","flashrnn_backward","7","377.5","1e3"
"""


def test_kernels_and_their_counters_are_read_from_ncus_table():
    assert list(parse(OUTPUT.splitlines())) == [
        {"kernel": "flashrnn_forward", "memory_bytes": 126_877_696, "l2_bytes": 251_658_240},
        {"kernel": "flashrnn_backward", "memory_bytes": 377, "l2_bytes": 1000},
    ]
