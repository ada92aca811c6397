"""Chapter 7: wrong answers that students give, each of which its check must refuse."""

from __future__ import annotations

from tests.exercises.ch03 import but

HIT = '''
def hit_tokens(known, prompt, block_size):
    best = 0
    for ids in known:
        same = 0
        while same < min(len(ids), len(prompt) - 1) and ids[same] == prompt[same]:
            same += 1
        best = max(best, same // block_size * block_size)
    return best
'''

INSERT = '''
def insert(root, blocks):
    node, at = root, 0
    while at < len(blocks) and blocks[at] in node.children:
        child = node.children[blocks[at]]
        same = 0
        while same < len(child.key) and blocks[at + same:at + same + 1] == [child.key[same]]:
            same += 1
        if same < len(child.key):
            upper = Branch(child.key[:same], {child.key[same]: child})
            node.children[upper.key[0]] = upper
            child.key = child.key[same:]
            child = upper
        node, at = child, at + same
    if at < len(blocks):
        node.children[blocks[at]] = Branch(blocks[at:])
    return len(blocks) - at
'''

EVICT = '''
def evict(root, n):
    gone = []
    while len(gone) < n:
        free, waiting = [], [root]
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            free += [(child.last_use, child, node) for child in node.children.values()
                     if not child.children and not child.locks]
        if not free:
            break
        _, leaf, parent = min(free, key=lambda entry: entry[0])
        first = leaf.key[0]
        gone.append(leaf.key.pop())
        if not leaf.key:
            del parent.children[first]
    return gone
'''

PUBLISHABLE = '''
def publishable(token_ids, start, fed, refused, block_size):
    written = start + fed - refused
    return [token_ids[i:i + block_size] for i in range(0, written - block_size + 1, block_size)]
'''

KEYS = '''
def block_keys(ids, salt, block_size):
    keys = [tuple(ids[i:i + block_size]) for i in range(0, len(ids) - block_size + 1, block_size)]
    if keys and salt is not None:
        keys[0] = (salt, keys[0])
    return keys
'''

CHAT = '''
def chat_cost(system, turns, block_size):
    costs, said, stored = [], system, 0
    for question, answer in turns:
        prompt = said + question
        cached = stored // block_size * block_size
        costs.append(prompt - cached + answer - 1)
        said, stored = prompt + answer, prompt + answer - 1
    return costs
'''

WRONG: dict[str, list[tuple[str, str]]] = {
    "7.1": [
        ("counts tokens, not whole blocks", but(HIT, "same // block_size * block_size", "same")),
        ("takes the last token from the cache too", but(HIT, "len(prompt) - 1", "len(prompt)")),
        ("looks at the newest sequence only", but(HIT, "for ids in known:", "for ids in known[-1:]:")),
        ("the first match in place of the longest", but(
            HIT, "max(best, same // block_size * block_size)", "best or same // block_size * block_size")),
        ("blocks that occur anywhere", '''
def hit_tokens(known, prompt, block_size):
    cut = lambda ids: [tuple(ids[i:i + block_size]) for i in range(0, len(ids) - block_size + 1, block_size)]
    have = {tuple(ids[i:i + block_size]) for ids in known for i in range(len(ids))}
    return sum(block in have for block in cut(prompt[:-1])) * block_size
'''),
        ("only sequences that are wholly contained", but(
            HIT, "best = max(best, same // block_size * block_size)",
            "best = max(best, same // block_size * block_size if same == len(ids) else 0)")),
    ],
    "7.2": [
        ("no split: overwrites the edge", '''
def insert(root, blocks):
    node, at = root, 0
    while at < len(blocks) and blocks[at] in node.children:
        child = node.children[blocks[at]]
        if blocks[at:at + len(child.key)] != child.key:
            break
        node, at = child, at + len(child.key)
    if at < len(blocks):
        node.children[blocks[at]] = Branch(blocks[at:])
    return len(blocks) - at
'''),
        ("no split: hangs the rest below the whole edge", but(
            INSERT, "if same < len(child.key):", "if False:")),
        ("the lower part loses its children", but(
            INSERT, "{child.key[same]: child}", "{child.key[same]: Branch(child.key[same:])}")),
        ("says how many blocks the sequence has", but(INSERT, "return len(blocks) - at", "return len(blocks)")),
        ("an empty leaf for what is known", but(
            INSERT, "    if at < len(blocks):\n        node.children[blocks[at]] = Branch(blocks[at:])",
            "    node.children[blocks[at] if at < len(blocks) else ()] = Branch(blocks[at:])")),
    ],
    "7.3": [
        ("the most recently used", but(EVICT, "min(free", "max(free")),
        ("whole leaves", but(EVICT, "        gone.append(leaf.key.pop())\n        if not leaf.key:\n",
                             "        gone += leaf.key[::-1]\n        if True:\n")),
        ("locks ignored", but(EVICT, " and not child.locks", "")),
        ("any node, children or not", but(EVICT, "not child.children and ", "")),
        ("from the front of the edge", but(EVICT, "leaf.key.pop()", "leaf.key.pop(0)")),
        ("the leaves of the start only", but(
            but(EVICT, "    gone = []\n", "    gone, once = [], None\n"),
            "        if not free:\n",
            "        once = [child for _, child, _ in free] if once is None else once\n"
            "        free = [entry for entry in free if entry[1] in once]\n        if not free:\n")),
    ],
    "7.4": [
        ("all that is known, the newest token too", but(PUBLISHABLE, "start + fed - refused", "len(token_ids)")),
        ("refused guesses counted", but(PUBLISHABLE, "start + fed - refused", "start + fed")),
        ("the block being filled as well", but(PUBLISHABLE, "written - block_size + 1", "written")),
        ("what was there before the step", but(PUBLISHABLE, "start + fed - refused", "start")),
        ("the step's own tokens only", but(PUBLISHABLE, "start + fed - refused", "fed - refused")),
    ],
    "7.5": [
        ("joined as text", but(KEYS, "        keys[0] = (salt, keys[0])",
                               "        keys = [salt + ''.join(map(str, key)) for key in keys]")),
        ("None as text", but(KEYS, "    if keys and salt is not None:\n        keys[0] = (salt, keys[0])",
                             "    if keys:\n        keys[0] = (str(salt), keys[0])")),
        ("the empty text is no salt", but(KEYS, "salt is not None", "salt")),
        ("characters as token ids", but(
            KEYS, "    keys = [", "    ids = [ord(c) for c in salt or ''] + list(ids)\n    keys = [")),
        ("a short hash", but(KEYS, "(salt, keys[0])", "(sum(map(ord, salt)) % 1024, keys[0])")),
        ("no salt at all", but(KEYS, "keys and salt is not None", "False")),
    ],
    "7.6": [
        ("the last token of an answer is stored", but(CHAT, "said, stored = prompt + answer, prompt + answer - 1",
                                                      "said, stored = prompt + answer, prompt + answer")),
        ("tokens, not blocks", but(CHAT, "stored // block_size * block_size", "stored")),
        ("the prompt alone", but(CHAT, "prompt - cached + answer - 1", "prompt - cached")),
        ("every token of the answer", but(CHAT, "prompt - cached + answer - 1", "prompt - cached + answer")),
        ("nothing is kept", but(CHAT, "stored // block_size * block_size", "0")),
        ("prompts are kept, answers not", but(CHAT, "said, stored = prompt + answer, prompt + answer - 1",
                                              "said, stored = prompt + answer, prompt")),
    ],
}
