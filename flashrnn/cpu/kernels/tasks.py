"""A task is one head of a part of the batch; every thread takes the next one until none is left."""


@cfunc(void(words), cache=CACHE, pipeline_class=Kernel, **OPTIONS)
def kernel(data):
    z = arguments_at(data)
    begun, threads = words_at(data, 0), words_at(data, 1)
    task = next_of(begun)
    if task < z.tasks:  # only so many threads have a workspace
        workspace = offset(z.workspace, next_of(threads) * z.workspace_size)
        if z.clear:
            clear(workspace, z.workspace_size)
        while task < z.tasks:
            part, head = task // z.heads, task % z.heads
            first = part * z.part
            run(z, part, head, first, min(first + z.part, z.batch), workspace)
            task = next_of(begun)
