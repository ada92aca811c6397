"""The tables of drafts: what they gain, what is left out because it loops, and what a drafted token costs."""

from __future__ import annotations

from collections.abc import Sequence, Set

from benchmarks.compare import Book
from benchmarks.prefix_tables import ends
from benchmarks.repetition import GRAM, LEAST_COVERED, LEAST_REPEATS, LONGEST_STRETCH
from benchmarks.result_file import Result
from benchmarks.table import DASH, Table, number, share, with_range


def speculative_table(book: Book) -> Table:
    """What each draft gains on each kind of prompt, beside the same engine without one."""
    result = book.of_kind("speculative")
    rows = [(row["prompts_kind"], draft(row), str(row["k"]), str(row["width"]), str(row["prompts"]),
             number(row["baseline_tok_s"], ",.1f"), number(row["tok_s"], ",.1f"),
             share(row["accepted_tokens"], row["drafted_tokens"]), number(row["tokens_per_pass"], ",.2f"),
             number(row["itl_p50_ms"], ",.1f"), number(row["tpot_p50_ms"], ",.1f"),
             with_range(f"{row['speedup']:,.2f}x", row["speedup_range"] if result["rounds"] > 1 else None, ",.2f"))
            for row in result["rows"]]
    header = ("kind", "draft", "K", "width", "prompts", "baseline tok/s", "tok/s", "acceptance", "tokens/pass",
              "ITL p50 ms", "TPOT p50 ms", "speed-up")
    notes = [f"Greedy, up to {result['max_tokens']} tokens, ending at EOS, in liteinfer-radix's engine with each draft "
             "and without (baseline). Width 1: tokens over the requests' times from arrival to last token, the drafts "
             "taking turns prompt by prompt. Other widths: the same prompts over and over, that many at once, tokens "
             "over the wall.",
             "Acceptance: of the guesses that were checked. Tokens/pass: of one request in a decode step, of at most "
             "K + 1. ITL: between two events of a request, which may bring several tokens; TPOT: per token. Speed-up: "
             "of tok/s, the median of the rounds' ratios.",
             *_pauses(result["rows"]), *_left_out(result["loops"]), *_same_tokens(result["rows"])]
    return Table("Speculative: what drafts gain", header, rows, [*notes, *ends(book, result)], keys=4)


def _pauses(rows: Sequence[Result]) -> list[str]:
    """What the pause rule is, once for each rule there is."""
    pauses = [row["pause"] for row in rows if row["pause"]]
    return [f"pause: a request gets no more drafts once at least {after} guesses of its were checked and less than "
            f"{cost:.0%} of them stood, {cost:g} of a step without drafts being what a guess is taken to cost."
            for cost, after in dict.fromkeys((pause["cost"], pause["after"]) for pause in pauses)]


def _left_out(loops: Sequence[Result]) -> list[str]:
    found = ", ".join(f"{part['prompts']} of {part['of']} of {part['prompts_kind']}" for part in loops
                      if part["prompts"])
    return [f"Left out, since the baseline's output falls into a loop: {found} (the table of loops has them)."
            if found else "No output falls into a loop; none is left out."]


def _same_tokens(rows: Sequence[Result]) -> list[str]:
    """In how many prompts the drafts changed no token, and where they did."""
    found = [(row["differs_from_baseline"]["differ"], row["differs_from_baseline"]["prompts"], row) for row in rows]
    prompts = sum(total for _, total, _ in found)
    other = ", ".join(f"{draft(row)} with K {row['k']} in {differ} of {total} of {row['prompts_kind']} at width "
                      f"{row['width']}" for differ, total, row in found if differ)
    same = prompts - sum(differ for differ, _, _ in found)
    return [f"The baseline's tokens: in {same} of {prompts} prompts of all rows{f'; others: {other}' if other else ''}."
            ] if rows else []


def loops_table(book: Book) -> Table:
    """The prompts that are in no row of the speculative table."""
    result = book.of_kind("speculative")
    drafts = list(dict.fromkeys(f"{draft(each)}, K {each['k']}" for part in result["loops"]
                                for each in part["speedups"]))
    rows = []
    for part in result["loops"]:
        gains = {f"{draft(each)}, K {each['k']}": each["speedup"] for each in part["speedups"]}
        rows.append((part["prompts_kind"], f"{part['prompts']} of {part['of']}",
                     *(DASH if part[key] is None else f"{part[key]:.0%}"
                       for key in ("repetition_share", "repetition_share_others")),
                     *(DASH if gains[name] is None else f"{gains[name]:,.2f}x" for name in drafts)))
    header = ("kind", "loops", "repeated, loops", "repeated, others", *drafts)
    notes = [f"An output falls into a loop if it ends in a stretch of at most {LONGEST_STRETCH} tokens, said "
             f"{LEAST_REPEATS} times or more, over at least {LEAST_COVERED} tokens; decided on the baseline's output "
             f"at width 1. Repeated: the share of an output's {GRAM}-grams that it has had before, the median over "
             "outputs. Below each draft: its speed-up on the prompts that loop, at width 1."]
    return Table("Loops: outputs that repeat themselves to the end", header, rows, notes + ends(book, result))


def draft_costs_table(book: Book) -> Table:
    """What a drafted token costs, and so the acceptance from which on it pays."""
    result = book.of_kind("speculative")
    rows = [(draft(one), str(one["k"]), f"{one['checked_steps']:,}", number(one["plain_ms"], ",.1f"),
             number(one["checked_ms"], ",.1f"), number(one["cost"], ",.3f")) for one in result["costs"]]
    header = ("draft", "K", "steps", "plain step ms", "step with K ms", "cost of a guess")
    notes = ["Medians at width 1, over the prompts that count: decode steps of the baseline, and steps that checked "
             "exactly K guesses, making them included. Cost of a guess: what it adds to a step, as a share of one "
             "without; accepted more often than that, it pays."]
    return Table("Draft costs: what a guess adds to a step", header, rows, notes + ends(book, result), keys=2)


def heads_table(book: Book) -> Table:
    """Draft heads of several sizes: what they know, and what a guess of theirs costs."""
    result = book.of_kind("heads")
    kinds = list(dict.fromkeys(kind for row in result["rows"] for kind in row["acceptance"]))
    rows = [(row["name"], str(row["layers"]), f"{row['intermediate_size']:,}", f"{row['vocab_size']:,}",
             f"{row['parameters'] / 1e6:,.1f} M", f"{row['steps']:,}",
             *(share(row["acceptance"].get(kind), 1, ".1%") for kind in kinds), number(row["plain_ms"], ",.1f"),
             number(row["guess_ms"], ",.1f"),
             with_range(number(row["cost"], ",.3f"), row["cost_range"] if result["rounds"] > 1 else None, ",.3f"))
            for row in result["rows"]]
    header = ("head", "layers", "inner", "may guess", "parameters", "steps", *kinds, "plain step ms", "guess ms",
              "guess / step")
    notes = [f"Acceptance by kind of prompt, from the heads' cards: of drafts of {result['k']} tokens begun at every "
             "place of the target's answers to held-out prompts, the share that stands. Guess: all that a drafted "
             "token takes to make, checking it not included; plain step: the same engine without drafts. One request, "
             f"ISL {result['isl']}, OSL {result['osl']}."]
    return Table("Heads: what a draft head's size buys", header, rows, notes + ends(book, result))


def only_drafts(result: Result, names: Set[str]) -> Result:
    """The part of a speculative result that is about these drafts, NAME or NAME@K as in the command.

    Raises:
        ValueError: a draft that is not in it.
    """
    def called(part: Result) -> tuple[str, str]:
        return part["draft"], f"{part['draft']}@{part['k']}{'+pause' if part.get('pause') else ''}"

    def kept(parts: Sequence[Result]) -> list[Result]:
        return [part for part in parts if not names.isdisjoint(called(part))]

    there = dict.fromkeys(name for row in result.get("rows", ()) if "draft" in row for name in called(row))
    if unknown := sorted(names - there.keys()):
        raise ValueError(f"no draft {unknown[0]!r} in these results; there are {', '.join(there) or 'none'}")
    loops = [part | {"speedups": kept(part["speedups"])} for part in result["loops"]]
    return result | {"rows": kept(result["rows"]), "loops": loops, "costs": kept(result["costs"])}


def draft(one: Result) -> str:
    return f"{one['draft']} (pause)" if one.get("pause") else str(one["draft"])
