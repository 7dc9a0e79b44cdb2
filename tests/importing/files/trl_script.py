"""Never executed: it would raise.

```sh
accelerate launch trl_script.py --model_name_or_path Qwen/Qwen3-0.6B --learning_rate 1e-5 --dtype bfloat16
```
"""

import argparse

from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

raise SystemExit("this script must not be executed")

parser = argparse.ArgumentParser()
parser.add_argument("--group-size", type=int, default=16)
args = parser.parse_args()
tokens = 384


def length_reward(completions, **columns):
    return [0.0 for _ in completions]


training_args = GRPOConfig(
    num_generations=args.group_size,
    per_device_train_batch_size=16,
    max_completion_length=tokens,
    max_steps=30,
    output_dir=length_reward(["x"]),
    report_to="wandb",
    temperature=0.7,
)
training_args.beta = 0.01
trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    args=training_args,
    reward_funcs=[length_reward],
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
)
