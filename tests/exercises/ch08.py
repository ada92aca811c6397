"""Chapter 8: wrong answers that students give, each of which its check must refuse."""

from __future__ import annotations

from tests.exercises.ch03 import but

VERIFY = '''
def verify_one(p, q, guess, top_p, draws):
    p = nucleus(p, top_p)
    if next(draws) * q[guess] < p[guess]:
        return guess
    left = [max(0.0, a - b) for a, b in zip(p, q)]
    draw = next(draws) * sum(left)
    for token, share in enumerate(left):
        draw -= share
        if draw < 0:
            return token
    return max(token for token, share in enumerate(left) if share)
'''

LOOKUP = '''
def lookup(ids, k, longest, eos):
    for n in range(min(longest, len(ids) - 1), 0, -1):
        for start in reversed(range(len(ids) - n)):
            if ids[start:start + n] == ids[-n:]:
                text = list(ids)
                for i in range(start + n, start + n + min(k, n + 1)):
                    text.append(text[i])
                draft = text[len(ids):]
                return draft[:draft.index(eos) + 1] if eos in draft else draft
    return []
'''

AFTER = '''
def after_pass(stored, draft, says, ends, left):
    taken = []
    for guess, token in zip([*draft, None], says):
        taken.append(token)
        if token != guess or token in ends or len(taken) == left:
            break
    return taken, stored + len(taken)
'''

PAIRS = '''
def pairs(start, fed, tokens):
    return [(place, tokens[place + 1]) for place in range(start + fed, len(tokens) - 1)]
'''

EXPECTED = '''
def expected_tokens(a, k):
    return sum(a ** n for n in range(k + 1))

def best_k(a, cost, most):
    return max(range(most + 1), key=lambda k: (expected_tokens(a, k) / (1 + k * cost), -k))
'''

LEFT = "    left = [max(0.0, a - b) for a, b in zip(p, q)]\n"
KEEP = "next(draws) * q[guess] < p[guess]"

WRONG: dict[str, list[tuple[str, str]]] = {
    "8.1": [
        ("judged as if greedy: only the likeliest stands", '''
def verify_one(p, q, guess, top_p, draws):
    next(draws)
    return max(range(len(p)), key=lambda token: p[token])
'''),
        ("every guess is kept", but(VERIFY, KEEP, "next(draws) >= 0")),
        ("a refused guess is replaced by a draw from p", but(VERIFY, LEFT, "    left = p\n")),
        ("a draw from p without the guess, as for a guess that was certain", but(
            VERIFY, LEFT, "    left = [0.0 if token == guess else share for token, share in enumerate(p)]\n")),
        ("the residual is not scaled", but(VERIFY, "next(draws) * sum(left)", "next(draws)")),
        ("the residual is not clamped", but(VERIFY, "max(0.0, a - b)", "abs(a - b)")),
        ("the residual the wrong way round", but(VERIFY, "max(0.0, a - b)", "max(0.0, b - a)")),
        ("kept with p, whatever q is", but(VERIFY, KEEP, "next(draws) < p[guess]")),
        ("kept only where p is at least q", but(VERIFY, KEEP, "next(draws) >= 0 and p[guess] >= q[guess]")),
        ("the number that decided draws again", '''
def verify_one(p, q, guess, top_p, draws):
    p, number = nucleus(p, top_p), next(draws)
    if number * q[guess] < p[guess]:
        return guess
    left = [max(0.0, a - b) for a, b in zip(p, q)]
    draw = number * sum(left)
    for token, share in enumerate(left):
        draw -= share
        if draw < 0:
            return token
    return max(token for token, share in enumerate(left) if share)
'''),
        ("top-p on the draft's side only", but(VERIFY, "nucleus(p, top_p)", "p")),
        ("top-p for the decision, the residual of all of p", but(
            but(VERIFY, "    p = nucleus(p, top_p)\n", "    whole, p = p, nucleus(p, top_p)\n"), "zip(p, q)",
            "zip(whole, q)")),
        ("top-p for the residual only", but(
            but(VERIFY, "    p = nucleus(p, top_p)\n", ""), LEFT,
            "    left = [max(0.0, a - b) for a, b in zip(nucleus(p, top_p), q)]\n")),
    ],
    "8.2": [
        ("finds itself", '''
def lookup(ids, k, longest, eos):
    for n in range(min(longest, len(ids)), 0, -1):
        for start in reversed(range(len(ids) - n + 1)):
            if ids[start:start + n] == ids[-n:]:
                return ids[start + n:start + n + min(k, n + 1)]
    return []
'''),
        ("shortest first", but(LOOKUP, "range(min(longest, len(ids) - 1), 0, -1)",
                               "range(1, min(longest, len(ids) - 1) + 1)")),
        ("the first time instead of the latest", but(LOOKUP, "reversed(range(len(ids) - n))", "range(len(ids) - n)")),
        ("copies across an EOS", but(LOOKUP, "draft[:draft.index(eos) + 1] if eos in draft else draft", "draft")),
        ("stops before the EOS", but(LOOKUP, "draft.index(eos) + 1", "draft.index(eos)")),
        ("stops where the text ends", but(
            LOOKUP, "                for i in range(start + n, start + n + min(k, n + 1)):\n"
            "                    text.append(text[i])\n",
            "                text += ids[start + n:start + n + min(k, n + 1)]\n")),
        ("k tokens, however short the match", but(LOOKUP, "min(k, n + 1)", "k")),
        ("n + 1 tokens, whatever k is", but(LOOKUP, "min(k, n + 1)", "n + 1")),
        ("copies the match, not what followed it", but(
            LOOKUP, "range(start + n, start + n + ", "range(start, start + ")),
    ],
    "8.3": [
        ("no token of the target's own after a whole draft", but(
            AFTER, "zip([*draft, None], says)", "zip(draft, says)")),
        ("only the guesses that stand", but(
            AFTER, "        taken.append(token)\n        if token != guess or",
            "        if token != guess:\n            break\n        taken.append(token)\n        if")),
        ("everything the target says", but(AFTER, "token != guess or ", "")),
        ("compares on behind a refused guess", '''
def after_pass(stored, draft, says, ends, left):
    taken = [token for guess, token in zip(draft, says) if token == guess] + says[len(draft):]
    return taken[:left], stored + len(taken[:left])
'''),
        ("goes on after an end", but(AFTER, " or token in ends", "")),
        ("an end only as the last token", but(AFTER, "token in ends", "says[-1] in ends")),
        ("drops the end", but(AFTER, "        taken.append(token)\n",
                              "        if token in ends:\n            break\n        taken.append(token)\n")),
        ("more than are left", but(AFTER, " or len(taken) == left", "")),
        ("stored: all that was fed", but(AFTER, "stored + len(taken)", "stored + 1 + len(draft)")),
        ("stored: the target's own token too", but(AFTER, "stored + len(taken)", "stored + len(taken) + 1")),
        ("stored: the newest token of before forgotten", but(AFTER, "stored + len(taken)", "stored + len(taken) - 1")),
    ],
    "8.4": [
        ("no token of the target's own", but(EXPECTED, "range(k + 1))\n", "range(1, k + 1))\n")),
        ("k a and one more", but(EXPECTED, "sum(a ** n for n in range(k + 1))", "1 + k * a")),
        ("all or nothing", but(EXPECTED, "sum(a ** n for n in range(k + 1))", "1 + a ** k")),
        ("divides by zero at a = 1", but(EXPECTED, "sum(a ** n for n in range(k + 1))",
                                         "(1 - a ** (k + 1)) / (1 - a) if a < 1 else 1")),
        ("one too many", but(EXPECTED, "range(k + 1))\n", "range(k + 2))\n")),
        ("the most tokens of a pass", but(EXPECTED, " / (1 + k * cost)", "")),
        ("the cost once for a pass", but(EXPECTED, "1 + k * cost", "1 + (k > 0) * cost")),
        ("always guesses", but(EXPECTED, "max(range(most + 1)", "max(range(1, most + 1)")),
        ("at cost 0 all are equal, so the most", but(EXPECTED, ", -k)", ", k)")),
    ],
    "8.5": [
        ("each token beside its own features", but(PAIRS, "tokens[place + 1]", "tokens[place]")),
        ("each token beside its own features, the last one too", '''
def pairs(start, fed, tokens):
    return [(place, tokens[place]) for place in range(start + fed, len(tokens))]
'''),
        ("a place too late", '''
def pairs(start, fed, tokens):
    return [(place, tokens[place - 1]) for place in range(start + fed + 1, len(tokens))]
'''),
        ("what is cached is read again", but(PAIRS, "start + fed", "start")),
        ("a prefix hit is forgotten", but(PAIRS, "start + fed", "fed")),
        ("pairs counted from the text's start", but(PAIRS, "start + fed", "max(start, fed)")),
    ],
}
