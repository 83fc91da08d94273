"""Forks jobs that train for ever, to be killed: torch is imported once, so that a kill costs no import.

Reads a line of JSON for each: {"directory", "model", "steps" (0: for ever), "exit_after" (seconds, or null)}; a model
`ddp` is two ranks. Answers with their process identifiers once they train, or with their statuses to {"reap": [...]}.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
from models import MODELS, batch_for

import gradtrace_recorder
from gradtrace_recorder.journal.writer import JournalWriter

# Drains all the time, so that kills hit a drain, and the renaming of a part, too.
JournalWriter.__init__.__kwdefaults__["half_records"] = 1024
torch.set_num_threads(1)


def train(order, rank, ready):
    model = order["model"]
    torch.manual_seed(0)
    if model == "ddp":
        store = dist.FileStore(order["directory"] + ".store", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    gradtrace_recorder.start(order["directory"], strict=True)
    net = MODELS["lists" if model == "ddp" else model](0.1)
    if model == "ddp":
        net = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters())
    draw = torch.Generator().manual_seed(1)
    step = 0
    while not order["steps"] or step < order["steps"]:
        inputs, labels = batch_for("lists" if model == "ddp" else model, draw)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
        step += 1
        time.sleep(0.01)  # for the drain to keep up with so small a journal
        if step == 3:
            os.write(ready, b".")
            if order["exit_after"] is not None:
                threading.Thread(target=leave, args=(order["exit_after"],), daemon=True).start()
    gradtrace_recorder.stop()


def leave(after):
    time.sleep(after)
    os._exit(7)


for line in sys.stdin:
    order = json.loads(line)
    if "reap" in order:
        answer = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in order["reap"]]
        print(json.dumps(answer), flush=True)
        continue
    pids = []
    heard, said = os.pipe()
    for rank in range(1 + (order["model"] == "ddp")):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.environ["MASTER_PORT"] = order["directory"]  # what tells one start from another
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(1 + (order["model"] == "ddp")))
                train(order, rank, said)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    os.close(said)
    count = 0
    while count < len(pids) and os.read(heard, 1):
        count += 1
    os.close(heard)
    print(json.dumps(pids), flush=True)
