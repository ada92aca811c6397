"""What the benchmark page shows, in order: each topic a stored result, its tables, and a sentence for each."""

from __future__ import annotations

from dataclasses import dataclass

MAIN = "paper"   # the result of the whole ladder

INTRO = (
    "Every rung of the ladder, measured, and beside it what it is compared with. Code writes every figure here, from "
    "the results stored in `benchmarks/results`: `make bench` measures them again on your machine, and `make render` "
    "writes this page.",
    "ISL and OSL are the tokens in and out of a request. TTFT is the time to its first token, ITL the gap between two "
    "of its tokens, E2E the time to its last one; p50 and p95 are percentiles. A ratio above 1.00x is better than what "
    "it is compared with; a `~` marks one whose sides were not measured alike. A bar is a row's share of the best row, "
    "and the best figure of each measured column is marked.",
)
NO_GPU = (
    f"No result of a GPU is stored. On a machine that has one, `make bench SHAPE={MAIN} ROUNDS=3`, then "
    f"`python -m benchmarks store benchmarks/results/local/{MAIN}.json benchmarks/results/NAME/{MAIN}.json` and "
    "`make render` put it beside these, with NAME for the machine.")
THEIRS = (
    "The figures of the two projects that this one answers, as their authors report them on their machines, beside "
    "ours. None was measured again here. Model and machine are others, so a ratio may be compared with a ratio, a time "
    "with nothing.")


@dataclass(frozen=True)
class Shown:
    """A table of `report.build_tables`, what it shows and why that matters, and the chapter that explains it."""

    table: str
    chapter: int
    says: str


@dataclass(frozen=True)
class Topic:
    """The tables of one stored result, of which only these drafts, NAME or NAME@K, if any are named."""

    title: str
    result: str
    shows: tuple[Shown, ...]
    drafts: tuple[str, ...] = ()


TOPICS = (
    Topic("The ladder", MAIN, (
        Shown("latency", 2, "How long one request that is alone on the machine waits: what a single reader feels, and "
                            "where the KV cache, our own forward and drafts count most."),
        Shown("throughput", 5, "How much gets done when all prompts are there at once: what a server sells, and where "
                               "width counts most, since the weights are read once for all sequences of a step. Greedy "
                               "output that may not end repeats itself after a while, and drafts guess a repetition: "
                               "what they gain on text that does not is in the table of speculative decoding."),
        Shown("counters", 4, "What each row did, counted and not timed: the evidence for each idea, which stays when "
                             "the machine changes."),
        Shown("ceilings", 3, "The least time in which this machine can do a decode step of each row, what it took, and "
                             "where the rest went."))),
    Topic("The ladder with shorter outputs", "references", (
        Shown("throughput", 9, "The same on outputs of 64 tokens, with the rows of chapter 9, which were written after "
                               "the run above: our own operators against vLLM's."),)),
    Topic("A decode step, part by part", "profile", (
        Shown("profile", 9, "Where the time of a step goes before chapter 9 and after it, beside the least that each "
                            "part could take."),)),
    Topic("What each piece of the fast row brings", "pieces", (
        Shown("pieces", 9, "The row without one of its pieces after the other: what a piece is worth depends on how "
                           "much else is in the step."),)),
    Topic("Across shapes", "shapes", (
        Shown("shapes", 2, "Where each idea matters: a cache the more the longer the answer, our own forward where "
                           "tokens come one by one, drafts where the answer repeats what was said, as output of forced "
                           "length does."),
        Shown("shapes_vllm", 8, "The same requests against vLLM: a short prompt with a long answer is all decode, a "
                                "long prompt with a short answer nearly all prefill."),
        Shown("shapes_split", 3, "The two parts of a request: reading the prompt, which is bound by computing, and "
                                 "each token after it, which is bound by reading the weights."))),
    Topic("Prompts and outputs of uneven length", "ragged", (
        Shown("throughput", 6, "What continuous batching buys: outputs of uneven length leave holes in a static batch, "
                               "and requests that come and go at every step fill them."),
        Shown("counters", 6, "The holes themselves: idle slots are places in a batch that computed nothing anybody "
                             "waits for."))),
    Topic("KV memory", "memory", (
        Shown("kv_memory", 4, "What a stream holds if its slot is reserved at full length and if it takes blocks as it "
                              "grows: this decides how many requests fit a machine at once."),
        Shown("waste", 4, "What paging itself wastes, at the end of each sequence's last block: small blocks waste "
                          "little."))),
    Topic("Prefix cache", "radix", (
        Shown("radix", 7, "How much sooner the first token comes when the prompt's beginning was computed before: the "
                          "longer the shared prefix, the more."),)),
    Topic("Prefix cache in three workloads", "sharing", (
        Shown("sharing", 7, "What the cache finds where prompts share nothing, a system prompt, or a conversation so "
                            "far: it pays by what is shared and costs next to nothing where nothing is."),)),
    Topic("Speculative decoding", "speculative", (
        Shown("speculative", 8, "What guessing tokens and checking them in one pass gains by kind of prompt: it wins "
                                "where guesses stand, and loses where they do not."),
        Shown("loops", 8, "The prompts left out above: a model that repeats itself is easy to guess, and would flatter "
                          "every draft.")),
          drafts=("ngram@4", "draft-head", "ngram+draft-head")),
)

PUBLISHED = (
    Topic("The ladder, published", MAIN, (
        Shown("published_latency", 2, "What the published page's rows take for one request, and ours: whether each "
                                      "rung buys there what it buys here."),
        Shown("published_throughput", 5, "The same with all prompts at once, where width brings the most on both "
                                         "sides."))),
    Topic("KV memory, published", "memory", (
        Shown("published_memory", 4, "What paging saves in mini-infer's table and in ours: the share saved follows "
                                     "from the lengths alone, the bytes from the model."),)),
    Topic("Prefix cache, published", "radix", (
        Shown("published_radix", 7, "How much sooner a cached prefix is answered there and here: the speed-up grows "
                                    "with the prefix on both machines."),)),
    Topic("Speculative decoding, published", "speculative", (
        Shown("published_speculative", 8, "What a draft gains there and here: theirs is a model a third the size of "
                                          "its target, ours a head trained on a laptop."),)),
)
