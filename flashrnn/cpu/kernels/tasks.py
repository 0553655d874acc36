"""Distribution of tasks: a task is one head and one part of the batch, and threads take tasks until none is left."""


@cfunc(void(words), cache=CACHE, pipeline_class=Kernel, **OPTIONS)
def kernel(data):
    z = arguments_at(data)
    begun, threads = words_at(data, 0), words_at(data, 1)
    task = next_of(begun)
    if task < z.tasks:  # a thread without a task may have no workspace
        workspace = offset(z.workspace, next_of(threads) * z.workspace_size)
        if z.clear:
            clear(workspace, z.workspace_size)
        while task < z.tasks:
            part, head = task // z.heads, task % z.heads
            first = part * z.part
            run(z, part, head, first, min(first + z.part, z.batch), workspace)
            task = next_of(begun)
