"""The second hint of each exercise, for a learner whom the first one did not bring there: the way, in words."""

# Not in Exercise: START.md lists the exercises without importing their checks.
SECOND_HINTS = {
    "0.1": "logits.topk(k, dim=1).indices is (N, k); compare it with labels.unsqueeze(1), which is (N, 1), and sum up "
    "all that is equal",
    "0.2": "warm up first and synchronise; then, in each round: read the clock, step(), synchronize(), read the clock; "
    "the list has one difference per round",
    "0.3": "a trained parameter counts three times (itself, its gradient, its momentum) and a frozen one once; "
    "p.nbytes is its size, p.requires_grad says which it is",
    "1.1": "zero_grad; under torch.autocast(images.device.type, dtype=dtype) logits and loss; outside it "
    "scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update(); both results detached",
    "1.2": "as in 1.1, and between backward and step: scaler.unscale_(optimizer), then "
    "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm), which you return",
    "1.3": "one line: the baseline's median divided by the candidate's; a Timing has .median, which is NaN where "
    "memory ran out",
    "1.4": "0 where capacity < 3 * weights; else (capacity - 2 * weights - fixed) // per_image as an int, and 0 where "
    "that is negative",
    "2.1": "for step, (images, labels) in enumerate(batches, first_step): train, four times add_scalar(..., step), "
    "scheduler.step() last; the next epoch begins at first_step + the number of rows",
    "2.2": "a counter that begins at 0: add the row's images to it first, then log the loss at the counter",
    "2.3": "every rank calls all_reduce(sums), outside of any if; then rank 0 alone opens the writer, and divides the "
    "summed loss and the hits by the images",
    "3.1": "three calls run.define_metric(name, summary=...): the two accuracies keep their max, the loss its min",
    "3.2": "load the newest checkpoint that is not after the last recorded step (none: 0), and log from the step after "
    "the last recorded one",
    "3.3": "with every_rank each returns a dictionary with the same group, the job_type, and a name with its rank in "
    "it; else rank 0 returns one with a name, and all others None",
    "4.1": "chunks = images.chunk(count); a copy.deepcopy(model) for each; pool.map in as many threads; one loss over "
    "torch.cat(outputs); backward; for each parameter the sum of its copies' grad; optimizer.step()",
    "4.2": "first = images.chunk(count)[0]; then mix its mean over (0, 2, 3) into batch_norm.running_mean, "
    "weighed by batch_norm.momentum",
    "4.3": "collect the sizes of batches that occur (the full one, and the rest unless it is dropped), split each by "
    "torch.empty(size).chunk(count), and take the smallest len",
    "5.1": "compare with train_single.py place by place; the five are: init_process_group with device and timeout; "
    "DistributedSampler and a DataLoader with it; DDP(model); all_reduce(counts); save on rank 0, if "
    "args.checkpoint is given",
    "5.2": "both: torchrun --nnodes=2 --nproc-per-node=1 --master-addr=127.0.0.1 --master-port=29555, and the script "
    "with its arguments; one has --node-rank=0, the other --node-rank=1",
    "5.3": "one epoch is not enough to decide; with several, set_epoch was forgotten exactly if every order equals the "
    "first",
    "5.4": "zero_grad once; all micro-batches but the last run forward and backward under model.no_sync(); each loss "
    "is divided by their number; one optimizer.step() at the end",
    "6.1": "read the last error of the rank that failed first; then find above it the last line of the card's own "
    "file: which rank is it, on which node, and what does it expect there",
    "6.2": "run the card again and write down, for each rank, the line of the job in which it stood; find the call "
    "that both should have reached, or that one has to make before the other can go on",
    "6.3": "print what the ranks, or the epochs, or one device and several, should have in common, and look where they "
    "do not",
    "7.1": 'for each index v2.functional.pil_to_tensor(Image.open(self.paths[index]).convert("RGB")), then augment; '
    "list(zip(torch.stack(images) / 255, labels)); one item is the first of a batch of one",
    "7.2": "where pad: make order longer, (order * world_size)[:n], with n = world_size * -(-len(order) // world_size)"
    "; then in any case order[rank::world_size]",
    "7.3": "model.eval(); a DataLoader over Subset(images, share_indices([*range(len(images))], rank, world_size)); "
    "under inference_mode add up (model(batch).argmax(1) == labels).sum() and len(labels)",
    "7.4": "two lines: info = get_worker_info(), then info.dataset.random = np.random.default_rng(info.seed), which "
    "differs between workers, and between epochs that start their workers anew",
    "8.1": "broadcast: rank 1's x everywhere; gather and reduce: rank 1 alone, the others None; all_ is the same for "
    "all; scatter and reduce_scatter: part r for rank r; all_to_all: [r, 10 + r, 20 + r, 30 + r] on rank r",
    "8.2": "algorithm = size / seconds; bus = algorithm times 2 * (n - 1) / n for all_reduce, 1 for broadcast, "
    "(n - 1) / n for the other three",
    "8.3": "for step in range(2 * (n - 1)): isend chunks[(rank - step) % n] to the right, recv from the left, wait; "
    "add to chunks[(rank - step - 1) % n] while step < n - 1, and copy into it afterwards",
    "8.4": "distance = 1; while distance < n: irecv from rank ^ distance into another tensor, isend x to it, "
    "wait for both, x += received, distance *= 2",
    "9.1": "send(bucket): flat = pack(bucket); sent.append((bucket, flat, dist.all_reduce(flat, async_op=True))); "
    "finish(): flush(), then for each sent: work.wait() and unpack(flat / world size, bucket); then sent.clear()",
    "9.2": "notes.append(bucket.buffer().nbytes); work = dist.all_reduce(bucket.buffer(), async_op=True); return "
    "work.get_future().then(…), where the function takes future.value()[0] and divides by the world size",
    "9.3": "SumOverRanks: forward and backward both clone, all-reduce the clone and return it; then total = "
    "SumOverRanks.apply(torch.stack([sums, squares, counts])), and mean and variance from it",
    "9.4": "optimizer.step(); if number % every == 0: all floating-point tensors of net.state_dict() are packed, "
    "all-reduced once, divided by the world size, and unpacked in place",
    "10.1": "begin with (2, 2, 12) if mixed else (4, 4, 8); divide the last by ranks from stage 1 on, the middle one "
    "from 2 on, the first from 3 on; return each times parameters",
    "10.2": "numbers = layers * 16 * width + 2 * width + 256; times tokens, and times 2 where mixed, else 4",
    "10.3": "shard.grad = torch.empty_like(shard); dist.reduce_scatter(shard.grad, list(gradient.chunk(n))); divide by "
    "n; optimizer.step(); dist.all_gather(list(weights.chunk(n)), shard.data)",
    "10.4": "up.chunk(n)[rank], up_bias.chunk(n)[rank], down.chunk(n, dim=1)[rank]; F.linear, F.gelu, F.linear without "
    "a bias; dist.all_reduce(y); return y + down_bias",
    "11.1": "loop 1: above rank 0 recv, x.requires_grad_(); stage(x); send output.detach(), on the last rank "
    "find_loss / len(inputs); loop 2: recv a gradient unless last, output.backward(gradient), send x.grad above rank 0",
    "11.2": "first = min(ranks - 1 - rank, micro): F0 and so on, first of them; then F{first + i} and B{i} for each i "
    "in range(micro - first); then the backward passes that are left",
    "11.3": "for places in combinations(range(1, len(times)), stages - 1): the ends are (0, *places, len(times)); the "
    "largest sum(times[begin:end]) of pairwise(ends) has to be smallest",
    "11.4": "ring = 2 * (ranks - 1) / ranks; data: ring * weights; tensor: 4 * layers * ring * tokens * width; "
    "pipeline: 2 * tokens * width; each times 2 bytes",
    "12.1": "self.model = models.build(net, num_classes=num_classes); return F.cross_entropy(…); self.log(name, mean, "
    "sync_dist=True), twice; return SGD(self.parameters(), self.lr, momentum=0.9); L.Trainer(max_epochs, devices, "
    "num_nodes, **QUIET)",
    "12.2": "pairs of rank 0 and pairs of all ranks, as two flat lists: of each the hits divided by its length; then "
    "dict(all pairs), whose values have each image's hit once",
    "12.3": 'seconds = time.perf_counter() - self.began; then pl_module.log("slowest", seconds, …) with on_step=False, '
    'on_epoch=True, reduce_fx="max", sync_dist=True',
    "12.4": "share = ceil(images / ranks); batches = ceil(share / batch_size); steps = ceil(batches / accumulate); "
    "return epochs * steps",
    "13.1": "--mem=1500M, --time=00:05:00, --output=ddp-%j.out; srun torchrun --nnodes=2 --nproc-per-node=1 "
    '--rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:$port", then the script',
    "13.2": "signal.signal(signal.SIGTERM, lambda number, frame: told.append(number)); stop = torch.tensor(len(told)); "
    "dist.all_reduce(stop); if rank == 0: torch.save to another name, then .replace; if stop: return",
    "13.3": "numNodes: 2, numProcPerNode: 4, command, resourcesPerNode with limits; then memory: 32+, use_spot, "
    'job_recovery and any_of deeper than num_nodes and run; --master-addr=$(echo "$SKYPILOT_NODE_IPS" | head -n1)',
    "13.4": "mean = mtbf / nodes; interval = interval or sqrt(2 * checkpoint * mean); hours = work / (nodes * "
    "efficiency) / interval * mean * exp(restart / mean) * expm1((interval + checkpoint) / mean); then hours * nodes * "
    "price",
    "14.1": "hvd.init(), device; DistributedSampler(train, size, rank, drop_last=True); hvd.DistributedOptimizer("
    "optimizer, named_parameters=…); broadcast_parameters, broadcast_optimizer_state, root_rank=0; counts = "
    "hvd.allreduce(counts, op=hvd.Sum)",
    "14.2": 'json.dumps of {"cluster": {"worker": [all addresses, in their order]}, '
    '"task": {"type": "worker", "index": index}}',
    "14.3": "in each round: dist.send(weights, dst=worker) to all; then, for each, dist.recv(gradient, src=worker) and "
    "total += gradient; then weights -= lr * total / len(workers), in place",
    "14.4": "send to all, sent = {worker: 0, …}; for update in range(updates): worker = dist.recv(gradient), its age "
    "is update - sent[worker], one step in place, sent[worker] = update + 1, and a send to this worker alone",
    "15.1": "times = [seconds for seconds, top1 in curve]; epoch = (times[-1] - times[0]) / (len(times) - 1); the "
    "start-up is times[0] - epoch; return start-up + epochs * epoch",
    "15.2": 'one line: statistics.median over lap["seconds"] if lap["reached"] else math.inf, for all laps',
}
