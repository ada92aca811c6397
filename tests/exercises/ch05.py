"""Chapter 5: wrong answers that students give, each of which its check must refuse."""

from __future__ import annotations

from tests.exercises.ch03 import but

RECTANGLE = '''
def rectangle(sequences, pad_id):
    width = max(len(s) for s in sequences)
    ids = torch.tensor([[pad_id] * (width - len(s)) + s for s in sequences])
    mask = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in sequences])
    return ids, mask, (mask.cumsum(dim=1) - 1).clamp(min=0)
'''

SLOT_STEPS = '''
def slot_steps(lengths, width):
    passes = sum(max(lengths[i:i + width]) for i in range(0, len(lengths), width))
    return passes, passes * width, passes * width - sum(lengths)
'''

TURNING_POINT = '''
def turning_point(weight_bytes, flops_per_token, bytes_per_s, flops_per_s):
    reading = weight_bytes / bytes_per_s
    computing = flops_per_token / flops_per_s
    return reading / computing
'''

PLAN = '''
def plan(lengths, width):
    order = sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True)
    return [order[i:i + width] for i in range(0, len(order), width)]
'''

GROW = '''
def grow(ids, mask, new, pad_id):
    ids = torch.cat((ids, new[:, None]), dim=1)
    mask = torch.cat((mask, torch.ones_like(new)[:, None]), dim=1)
    return ids, mask, mask.sum(dim=1, keepdim=True) - 1
'''

WRONG: dict[str, list[tuple[str, str]]] = {
    "5.1": [
        ("mask from the pad id", but(
            RECTANGLE, "torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in sequences])",
            "(ids != pad_id).long()")),
        ("padded on the right", but(
            but(RECTANGLE, "[pad_id] * (width - len(s)) + s", "s + [pad_id] * (width - len(s))"),
            "[0] * (width - len(s)) + [1] * len(s)", "[1] * len(s) + [0] * (width - len(s))")),
        ("positions count the padding", but(
            RECTANGLE, "(mask.cumsum(dim=1) - 1).clamp(min=0)", "torch.arange(width).expand(len(sequences), -1)")),
        ("positions from 1", but(RECTANGLE, "(mask.cumsum(dim=1) - 1).clamp(min=0)", "mask.cumsum(dim=1)")),
        ("positions of pads below 0", but(RECTANGLE, ".clamp(min=0)", "")),
        ("1 for padding", but(RECTANGLE, "[0] * (width - len(s)) + [1] * len(s)",
                              "[1] * (width - len(s)) + [0] * len(s)")),
        ("cut to the shortest", but(
            but(RECTANGLE, "max(len(s) for s in sequences)", "min(len(s) for s in sequences)"),
            "return ids", "sequences = [s[-width:] for s in sequences]\n    ids = torch.tensor(sequences)\n"
            "    mask = torch.ones_like(ids)\n    return ids").replace(
                "    ids = torch.tensor([[pad_id] * (width - len(s)) + s for s in sequences])\n", "").replace(
                "    mask = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in sequences])\n", "")),
    ],
    "5.2": [
        ("every batch as long as the longest of all", but(
            SLOT_STEPS, "sum(max(lengths[i:i + width]) for i in range(0, len(lengths), width))",
            "max(lengths) * -(-len(lengths) // width)")),
        ("a freed slot takes the next request", but(
            SLOT_STEPS, "sum(max(lengths[i:i + width]) for i in range(0, len(lengths), width))",
            "-(-sum(lengths) // width)")),
        ("the prefill is not a pass", but(SLOT_STEPS, "sum(max(lengths[i:i + width])",
                                          "sum(max(lengths[i:i + width]) - 1")),
        ("the last batch counts its requests only", but(
            SLOT_STEPS, "return passes, passes * width, passes * width - sum(lengths)",
            "slots = sum(max(lengths[i:i + width]) * len(lengths[i:i + width]) "
            "for i in range(0, len(lengths), width))\n    return passes, slots, slots - sum(lengths)")),
        ("useful for idle", but(SLOT_STEPS, "passes * width - sum(lengths)", "sum(lengths)")),
    ],
    "5.3": [
        ("upside down", but(TURNING_POINT, "reading / computing", "computing / reading")),
        ("the machine's balance alone", but(TURNING_POINT, "reading / computing", "flops_per_s / bytes_per_s")),
        ("the model's balance alone", but(TURNING_POINT, "reading / computing", "weight_bytes / flops_per_token")),
        ("bits for bytes", but(TURNING_POINT, "weight_bytes / bytes_per_s", "weight_bytes / 8 / bytes_per_s")),
        ("rates swapped", but(
            but(TURNING_POINT, "weight_bytes / bytes_per_s", "weight_bytes / flops_per_s"),
            "flops_per_token / flops_per_s", "flops_per_token / bytes_per_s")),
    ],
    "5.4": [
        ("as they come", but(PLAN, "sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True)",
                             "list(range(len(lengths)))")),
        ("the short ones first", but(PLAN, ", reverse=True", "")),
        ("lengths instead of numbers", but(
            PLAN, "sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True)",
            "sorted(lengths, reverse=True)")),
        ("the last batch is dropped", but(PLAN, "range(0, len(order), width)",
                                          "range(0, len(order) - width + 1, width)")),
        ("dealt round like cards", but(PLAN, "[order[i:i + width] for i in range(0, len(order), width)]",
                                       "[order[i::-(-len(order) // width)] for i in range(-(-len(order) // width))]")),
        ("all in one", but(PLAN, "[order[i:i + width] for i in range(0, len(order), width)]", "[order]")),
    ],
    "5.5": [
        ("mask from the pad id, as it was", but(
            GROW, "torch.cat((mask, torch.ones_like(new)[:, None]), dim=1)", "(ids != pad_id).long()")),
        ("a new token with the pad's id is hidden", but(
            GROW, "torch.ones_like(new)[:, None]", "(new != pad_id).long()[:, None]")),
        ("the column's number as position", but(
            GROW, "mask.sum(dim=1, keepdim=True) - 1", "torch.full_like(new, ids.shape[1] - 1)[:, None]")),
        ("positions from 1", but(GROW, "mask.sum(dim=1, keepdim=True) - 1", "mask.sum(dim=1, keepdim=True)")),
        ("the mask does not grow", but(GROW, "torch.cat((mask, torch.ones_like(new)[:, None]), dim=1)", "mask")),
        ("ones everywhere", but(GROW, "torch.cat((mask, torch.ones_like(new)[:, None]), dim=1)",
                                "torch.ones_like(ids)")),
    ],
}
