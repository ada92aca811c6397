"""Chapter 6: wrong answers that students give, each of which its check must refuse."""

from __future__ import annotations

from tests.exercises.ch03 import but

ONE_STEP = '''
def one_step(running, waiting, budget, max_num_seqs):
    chunks = []
    for place, (computed, tokens) in enumerate(running):
        younger = len(running) - place - 1
        chunks.append(min(tokens - computed, budget - younger))
        budget -= chunks[-1]
    for tokens in waiting:
        if budget == 0 or len(chunks) == max_num_seqs:
            break
        chunks.append(min(tokens, budget))
        budget -= chunks[-1]
    return chunks
'''

WAITING_FIRST = '''
def one_step(running, waiting, budget, max_num_seqs):
    new, places = [], max_num_seqs - len(running)
    for tokens in waiting[:places]:
        if budget > len(running):
            new.append(min(tokens, budget - len(running)))
            budget -= new[-1]
    chunks = []
    for place, (computed, tokens) in enumerate(running):
        chunks.append(min(tokens - computed, budget - (len(running) - place - 1)))
        budget -= chunks[-1]
    return chunks + new
'''

MAKE_ROOM = '''
def make_room(lengths, free, block_size):
    tokens = [prompt + output for prompt, output in lengths]
    running, gone = list(range(len(tokens))), []
    for i in range(len(tokens)):
        if i not in running:
            continue
        needed = blocks_for(tokens[i], block_size) - blocks_for(tokens[i] - 1, block_size)
        while needed > free and i in running:
            victim = running.pop()
            free += blocks_for(tokens[victim] - 1, block_size)
            gone.append((victim, tokens[victim]))
        if i in running:
            free -= needed
    return gone
'''

PASSES = '''
def passes(lengths, width):
    static = sum(max(lengths[i:i + width]) for i in range(0, len(lengths), width))
    empty_at = [0] * width
    for n in lengths:
        slot = empty_at.index(min(empty_at))
        empty_at[slot] += n
    return static, max(empty_at)
'''

PREEMPT = '''
def preempt(scheduler, request):
    scheduler.running.remove(request)
    scheduler.kv.free(request)
    request.num_computed_tokens = 0
    scheduler.waiting.appendleft(request)
'''

ADMITTED = '''
def admitted(needed, free, num_blocks, watermark, anybody_runs):
    count = 0
    for blocks in needed:
        spare = int(watermark * num_blocks) if anybody_runs or count else 0
        if blocks + spare > free:
            break
        free -= blocks
        count += 1
    return count
'''

WRONG: dict[str, list[tuple[str, str]]] = {
    "6.1": [
        ("no token kept back for the younger", but(ONE_STEP, "budget - younger", "budget")),
        ("computed tokens again", but(ONE_STEP, "min(tokens - computed,", "min(tokens,")),
        ("the budget is each request's own", but(
            ONE_STEP, "min(tokens - computed, budget - younger))\n        budget -= chunks[-1]",
            "min(tokens - computed, budget - younger))")),
        ("a prompt has to fit as a whole", but(ONE_STEP, "len(chunks) == max_num_seqs:",
                                               "len(chunks) == max_num_seqs or tokens > budget:")),
        ("a small one overtakes", but(
            but(ONE_STEP, "len(chunks) == max_num_seqs:\n            break",
                "len(chunks) == max_num_seqs or tokens > budget:\n            continue"),
            "min(tokens, budget)", "tokens")),
        ("max_num_seqs for the admitted alone", but(ONE_STEP, "len(chunks) == max_num_seqs",
                                                    "len(chunks) - len(running) == max_num_seqs")),
        ("requests without a token in the step", but(ONE_STEP, "budget == 0 or len(chunks)", "len(chunks)")),
        ("those who wait come first", WAITING_FIRST),
    ],
    "6.2": [
        ("the oldest goes", but(MAKE_ROOM, "running.pop()", "running.pop(0)")),
        ("the one that asks goes", but(MAKE_ROOM, "victim = running.pop()",
                                       "victim = i\n            running.remove(i)")),
        ("only its output is lost", but(MAKE_ROOM, "gone.append((victim, tokens[victim]))",
                                        "gone.append((victim, lengths[victim][1]))")),
        ("only its prompt is computed again", but(MAKE_ROOM, "gone.append((victim, tokens[victim]))",
                                                  "gone.append((victim, lengths[victim][0]))")),
        ("only what was stored", but(MAKE_ROOM, "gone.append((victim, tokens[victim]))",
                                     "gone.append((victim, tokens[victim] - 1))")),
        ("a block is not used up", but(MAKE_ROOM, "free -= needed", "pass")),
        ("never itself", but(MAKE_ROOM, "while needed > free and i in running:",
                             "while needed > free and running[-1] != i:")),
        ("a new block for every token", but(
            MAKE_ROOM, "blocks_for(tokens[i], block_size) - blocks_for(tokens[i] - 1, block_size)", "1")),
    ],
    "6.3": [
        ("the lower bound", but(PASSES, "max(empty_at)", "-(-sum(lengths) // width)")),
        ("a pass more for each prompt", but(
            but(PASSES, "max(lengths[i:i + width])", "1 + max(lengths[i:i + width])"), "+= n", "+= n + 1")),
        ("slots in turn", but(but(PASSES, "for n in lengths:", "for i, n in enumerate(lengths):"),
                              "empty_at.index(min(empty_at))", "i % width")),
        ("the longest first", but(PASSES, "for n in lengths:", "for n in sorted(lengths, reverse=True):")),
        ("the same as static", but(PASSES, "max(empty_at)", "static")),
        ("static batches wait for the longest of all", but(
            PASSES, "max(lengths[i:i + width])", "max(lengths)")),
    ],
    "6.4": [
        ("still to the tail", but(PREEMPT, "appendleft", "append")),
        ("still starts over", but(PREEMPT, "request.num_computed_tokens = 0",
                                  "request.num_computed_tokens = 0\n    request.output_token_ids.clear()")),
        ("the blocks stay", but(PREEMPT, "scheduler.kv.free(request)", "pass")),
        ("still counts as computed", but(PREEMPT, "request.num_computed_tokens = 0", "pass")),
        ("the prompt counts as computed", but(PREEMPT, "= 0", "= len(request.prompt_token_ids)")),
        ("the newest token is taken back", but(PREEMPT, "request.num_computed_tokens = 0",
                                               "request.num_computed_tokens = 0\n    request.output_token_ids.pop()")),
        ("never comes back", but(PREEMPT, "scheduler.waiting.appendleft(request)", "pass")),
        ("runs and waits", but(PREEMPT, "scheduler.running.remove(request)", "pass")),
    ],
    "6.5": [
        ("small ones overtake", but(ADMITTED, "break", "continue")),
        ("no watermark", but(ADMITTED, "blocks + spare > free", "blocks > free")),
        ("a share of what is free", but(ADMITTED, "watermark * num_blocks", "watermark * free")),
        ("the watermark in an empty engine too", but(ADMITTED, " if anybody_runs or count else 0", "")),
        ("not for those after the first", but(ADMITTED, "anybody_runs or count", "anybody_runs")),
        ("taken away with each admission", but(ADMITTED, "free -= blocks", "free -= blocks + spare")),
        ("an exact fit is refused", but(ADMITTED, "blocks + spare > free", "blocks + spare >= free")),
        ("blocks are not used up", but(ADMITTED, "free -= blocks", "pass")),
    ],
}
