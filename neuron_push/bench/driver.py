"""vLLM's own serving benchmark as a child process that runs it again and again.

Importing it takes seconds of a core: it is imported once. Each line on standard input is a JSON
list of its arguments; each line on the original standard output answers one, ``{"error": null}``
or what went wrong. What the benchmark itself prints goes to the standard error.

    python -m neuron_push.bench.driver
"""

from __future__ import annotations

import json
import os
import sys


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    print(json.dumps({"error": None}), file=answers)
    for line in sys.stdin:
        parser = FlexibleArgumentParser()
        serve.add_cli_args(parser)
        error: str | None = None
        try:
            serve.main(parser.parse_args(json.loads(line)))
        except KeyboardInterrupt:
            return 130
        except (Exception, SystemExit) as e:
            error = f"{type(e).__name__}: {e}"
        sys.stdout.flush()
        print(json.dumps({"error": error}), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
