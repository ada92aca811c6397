"""Wrong answers to chapter 1's exercises: what students really write, each of which its check must catch."""

from __future__ import annotations

WRONG: dict[str, list[tuple[str, str]]] = {
    "1.1": [
        ("the token a step gives is counted as fed to it", '''
def work(prompt, output):
    return [prompt + step for step in range(1, output + 1)], prompt + output - 1
'''),
        ("the first token is thought to come for free, before the first step", '''
def work(prompt, output):
    return [prompt + step for step in range(output - 1)], prompt + output - 1
'''),
        ("the last output token is counted as needed", '''
def work(prompt, output):
    return [prompt + step for step in range(output)], prompt + output
'''),
        ("the prompt is computed once and then one token a step, which is what a cache does", '''
def work(prompt, output):
    return [prompt] + [1] * (output - 1), prompt + output - 1
'''),
    ],
    "1.2": [
        ("only the newest token is fed after the prompt", '''
def generate(logits, prompt, max_tokens, eos):
    output, fed = [], list(prompt)
    while len(output) < max_tokens:
        token = int(logits(fed).argmax())
        output.append(token)
        fed = [token]
        if token in eos:
            return output, "stop"
    return output, "length"
'''),
        ("one token too many: the one after the prompt is not counted", '''
def generate(logits, prompt, max_tokens, eos):
    output = [int(logits(prompt).argmax())]
    for _ in range(max_tokens):
        if output[-1] in eos:
            return output, "stop"
        output.append(int(logits(prompt + output).argmax()))
    return output, "length"
'''),
        ("the EOS is left out of the output", '''
def generate(logits, prompt, max_tokens, eos):
    output = []
    while len(output) < max_tokens:
        token = int(logits(prompt + output).argmax())
        if token in eos:
            return output, "stop"
        output.append(token)
    return output, "length"
'''),
        ("the caller's prompt is appended to", '''
def generate(logits, prompt, max_tokens, eos):
    start = len(prompt)
    while len(prompt) - start < max_tokens:
        prompt.append(int(logits(prompt).argmax()))
        if prompt[-1] in eos:
            return prompt[start:], "stop"
    return prompt[start:], "length"
'''),
        ("the limit is looked at before the EOS", '''
def generate(logits, prompt, max_tokens, eos):
    output = []
    while True:
        output.append(int(logits(prompt + output).argmax()))
        if len(output) == max_tokens:
            return output, "length"
        if output[-1] in eos:
            return output, "stop"
'''),
        ("an EOS in the prompt ends the request", '''
def generate(logits, prompt, max_tokens, eos):
    ids = list(prompt)
    while len(ids) < len(prompt) + max_tokens and ids[-1] not in eos:
        ids.append(int(logits(ids).argmax()))
    return ids[len(prompt):], "stop" if ids[-1] in eos else "length"
'''),
        ("the prompt is returned with the output", '''
def generate(logits, prompt, max_tokens, eos):
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(int(logits(ids).argmax()))
        if ids[-1] in eos:
            return ids, "stop"
    return ids, "length"
'''),
    ],
    "1.3": [
        ("the token that crosses p is dropped", '''
def top_p(probs, p):
    best_first, order = probs.sort(descending=True)
    keep = best_first.cumsum(0) <= p
    keep[0] = True
    kept = torch.where(keep, best_first, 0.0)
    return torch.zeros_like(probs).scatter(0, order, kept / kept.sum())
'''),
        ("summed in the order of the vocabulary, before sorting", '''
def top_p(probs, p):
    keep = probs.cumsum(0) - probs < p
    keep[probs.argmax()] = True
    kept = torch.where(keep, probs, 0.0)
    return kept / kept.sum()
'''),
        ("what is kept is not renormalised", '''
def top_p(probs, p):
    best_first, order = probs.sort(descending=True)
    keep = best_first.cumsum(0) - best_first < p
    keep[0] = True
    return torch.zeros_like(probs).scatter(0, order, torch.where(keep, best_first, 0.0))
'''),
        ("the result stays sorted", '''
def top_p(probs, p):
    best_first, _ = probs.sort(descending=True)
    keep = best_first.cumsum(0) - best_first < p
    keep[0] = True
    kept = torch.where(keep, best_first, 0.0)
    return kept / kept.sum()
'''),
        ("one token too many where the sum reaches p exactly", '''
def top_p(probs, p):
    best_first, order = probs.sort(descending=True)
    keep = best_first.cumsum(0) - best_first <= p
    kept = torch.where(keep, best_first, 0.0)
    return torch.zeros_like(probs).scatter(0, order, kept / kept.sum())
'''),
        ("p is taken as a threshold on each probability (min-p)", '''
def top_p(probs, p):
    keep = probs >= p * probs.max()
    kept = torch.where(keep, probs, 0.0)
    return kept / kept.sum()
'''),
        ("p = 0 keeps nothing", '''
def top_p(probs, p):
    best_first, order = probs.sort(descending=True)
    kept = torch.where(best_first.cumsum(0) - best_first < p, best_first, 0.0)
    return torch.zeros_like(probs).scatter(0, order, kept / kept.sum().clamp(min=1e-12))
'''),
    ],
    "1.4": [
        ("TPOT divides by the tokens, not by the gaps", '''
def timing(added, times):
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    return times[0] - added, gaps, (times[-1] - times[0]) / len(times) if len(times) > 1 else None
'''),
        ("TTFT counts as an ITL", '''
def timing(added, times):
    gaps = [b - a for a, b in zip([added, *times], times, strict=False)]
    tpot = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
    return times[0] - added, gaps, tpot
'''),
        ("TTFT is the reading of the clock", '''
def timing(added, times):
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    tpot = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
    return times[0], gaps, tpot
'''),
        ("TPOT is the whole request's time per token, TTFT included", '''
def timing(added, times):
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    return times[0] - added, gaps, (times[-1] - added) / len(times) if len(times) > 1 else None
'''),
        ("one token has a TPOT of 0", '''
def timing(added, times):
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    return times[0] - added, gaps, sum(gaps) / max(1, len(gaps))
'''),
    ],
}
