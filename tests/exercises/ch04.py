"""Chapter 4: wrong answers that students give, each of which its check must refuse."""

from __future__ import annotations

from tests.exercises.ch03 import but

PLACE = '''
def place_step(tables, context_lens, query_lens, block_size, null_block):
    width = max(len(table) for table in tables)
    slots = []
    for table, context, new in zip(tables, context_lens, query_lens, strict=True):
        for t in range(context, context + new):
            slots.append(table[t // block_size] * block_size + t % block_size)
    return [table + [null_block] * (width - len(table)) for table in tables], slots
'''

POOL = '''
class MendedPool(BrokenPool):
    def share(self, blocks):
        for block in blocks:
            self.holders[block] += 1

    def free(self, blocks):
        for block, times in Counter(blocks).items():
            if self.holders[block] < times:
                raise ValueError(f"block {block} has too few holders")
        for block in blocks:
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.free_list.append(block)
'''
LOOKS_FIRST = '''        for block, times in Counter(blocks).items():
            if self.holders[block] < times:
                raise ValueError(f"block {block} has too few holders")
'''

GIVES_BACK = '''\
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.free_list.append(block)
'''
KEEPS_SHARED = '''\
            if self.holders[block] == 1:
                self.holders[block] = 0
                self.free_list.append(block)
'''

GATHER = '''
def gather_tokens(pages, table, length):
    return pages[table].flatten(0, 1)[:length].transpose(0, 1)
'''

WASTE = '''
def wasted_share(lengths, block_size):
    slots = sum(-(-length // block_size) * block_size for length in lengths)
    return (slots - sum(lengths)) / slots


def largest_block_size(lengths, limit):
    return max(size for size in (2**i for i in range(9)) if wasted_share(lengths, size) <= limit)
'''
EXACT = '''\
    slots = sum(-(-length // block_size) * block_size for length in lengths)
    return (slots - sum(lengths)) / slots
'''

WRITABLE = '''
def make_writable(cache, seq, position):
    table, pool = cache.tables[seq], cache.pool
    index = position // pool.block_size
    shared = table[index]
    if pool.ref_counts[shared] > 1:
        own, = pool.allocate(1)
        cache.keys[:, own] = cache.keys[:, shared]
        cache.values[:, own] = cache.values[:, shared]
        table[index] = own
        pool.free([shared])
'''

EVERY_BLOCK = '''
def make_writable(cache, seq, position):
    table, pool = cache.tables[seq], cache.pool
    for index, shared in enumerate(table):
        if pool.ref_counts[shared] > 1:
            own, = pool.allocate(1)
            cache.keys[:, own] = cache.keys[:, shared]
            cache.values[:, own] = cache.values[:, shared]
            table[index] = own
            pool.free([shared])
'''


WRONG: dict[str, list[tuple[str, str]]] = {
    "4.1": [
        ("the block is chosen one token late", but(PLACE, "table[t // block_size]",
                                                   "table[max(t - 1, 0) // block_size]")),
        ("the context is forgotten", but(PLACE, "range(context, context + new)", "range(new)")),
        ("positions instead of slots", but(PLACE, "table[t // block_size] * block_size + t % block_size", "t")),
        ("a block's number taken for its first slot", but(PLACE, "] * block_size + t", "] + t")),
        ("all new tokens into the last block", but(PLACE, "table[t // block_size]", "table[-1]")),
        ("padded with block 0", but(PLACE, "[null_block] *", "[0] *")),
        ("tables not padded", but(PLACE, "table + [null_block] * (width - len(table))", "list(table)")),
        ("the cache's own tables padded", but(PLACE, "[table + [null_block] * (width - len(table)) for",
                                              "[table.extend([null_block] * (width - len(table))) or table for")),
    ],
    "4.2": [
        ("as it was found", "class MendedPool(BrokenPool):\n    pass"),
        ("share still sets two", but(POOL, "self.holders[block] += 1", "self.holders[block] = 2")),
        ("free still appends at once", but(POOL, "            if self.holders[block] == 0:\n                self.free",
                                           "            self.free")),
        ("only guards against being listed twice", but(POOL, "if self.holders[block] == 0:",
                                                       "if block not in self.free_list:")),
        ("a shared block never comes back", but(POOL, GIVES_BACK, KEEPS_SHARED)),
        ("a double free passes", but(POOL, LOOKS_FIRST, "")),
        ("a refused call has freed some already", but(
            but(POOL, LOOKS_FIRST, ""), "            self.holders[block] -= 1\n",
            "            if not self.holders[block]:\n                raise ValueError('a block without a holder')\n"
            "            self.holders[block] -= 1\n")),
        ("the same block named twice passes", but(POOL, "self.holders[block] < times", "self.holders[block] < 1")),
    ],
    "4.3": [
        ("the tail of the last block", but(GATHER, "[:length]", "[:-(-length // pages.shape[1]) * pages.shape[1]]")),
        ("a reshape for the transpose", but(GATHER, ".transpose(0, 1)",
                                            ".reshape(pages.shape[2], length, pages.shape[3])")),
        ("full blocks only", but(GATHER, "pages[table]", "pages[table[:length // pages.shape[1]]]")),
        ("blocks by number", but(GATHER, "pages[table]", "pages[sorted(table)]")),
        ("blocks taken to lie in a row", but(
            GATHER, "pages[table].flatten(0, 1)[:length]",
            "pages.flatten(0, 1)[table[0] * pages.shape[1]:table[0] * pages.shape[1] + length]")),
        ("tokens first", but(GATHER, ".transpose(0, 1)", "")),
    ],
    "4.4": [
        ("one block more at every multiple", but(WASTE, "-(-length // block_size)", "(length // block_size + 1)")),
        ("of the tokens, not of the slots", but(WASTE, "(slots - sum(lengths)) / slots",
                                                "(slots - sum(lengths)) / sum(lengths)")),
        ("a mean of shares", but(WASTE, EXACT, """\
    return sum(-n % block_size / (n + -n % block_size) for n in lengths) / len(lengths)
""")),
        ("the average instead of the count", but(WASTE, EXACT, """\
    tail = len(lengths) * (block_size - 1) / 2
    return tail / (sum(lengths) + tail)
""")),
        ("the limit itself is too much", but(WASTE, "<= limit", "< limit")),
        ("the smallest that fits", but(WASTE, "return max(", "return min(")),
    ],
    "4.5": [
        ("values not copied", but(WRITABLE, "        cache.values[:, own] = cache.values[:, shared]\n", "")),
        ("only the first layer", but(but(WRITABLE, "cache.keys[:, own] = cache.keys[:, shared]",
                                         "cache.keys[0, own] = cache.keys[0, shared]"),
                                     "cache.values[:, own] = cache.values[:, shared]",
                                     "cache.values[0, own] = cache.values[0, shared]")),
        ("the shared block is never let go of", but(WRITABLE, "        pool.free([shared])\n", "")),
        ("the table still names the shared block", but(WRITABLE, "        table[index] = own\n", "")),
        ("a new block for both", but(WRITABLE, "pool.ref_counts[shared] > 1", "True")),
        ("every shared block", EVERY_BLOCK),
        ("nothing to do", "def make_writable(cache, seq, position):\n    pass"),
    ],
}
