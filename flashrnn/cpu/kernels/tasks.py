"""A task is one head of a part of the batch; every thread takes the next one until none is left."""

Arguments = from_dtype(np.dtype([(name, np.intp) for name in FIELDS]))


@intrinsic
def arguments_at(typing, data):
    def generate(context, builder, signature, values):
        return builder.bitcast(values[0], context.get_value_type(Arguments))

    return Arguments(data), generate


@intrinsic
def next_of(typing, counter):
    """Return the counter and add one to it, so that no two threads get the same number."""

    def generate(context, builder, signature, values):
        return builder.atomic_rmw("add", values[0], context.get_constant(intp, 1), "monotonic")

    return intp(counter), generate


@cfunc(void(words), cache=CACHE, **OPTIONS)
def kernel(data):
    z = arguments_at(data)
    begun, threads = words_at(data, 0), words_at(data, 1)
    task = next_of(begun)
    if task < z.tasks:  # only so many threads have a workspace
        workspace = offset(z.workspace, next_of(threads) * z.workspace_size)
        while task < z.tasks:
            part, head = task // z.heads, task % z.heads
            first = part * z.part
            run(z, part, head, first, min(first + z.part, z.batch), workspace)
            task = next_of(begun)
