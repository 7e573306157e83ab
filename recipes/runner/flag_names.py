"""List the flags of the recipes of this package, to report a misspelled flag before torch is imported.

A new flag edits this list, which a test compares with the constructors: growth is a decision.
"""

_FLAGS = """
accelerator: mnist, resnet, seq2seq
accumulate: mnist, resnet, seq2seq
arch: resnet
attention: seq2seq
augment: resnet
balance: mnist, resnet
batch_size: mnist, resnet, seq2seq
beam: seq2seq
bleu_tokenize: seq2seq
bn: resnet
cache_features: resnet
cache_gb: resnet
channels_last: mnist, resnet, seq2seq
check_val_every_n_epoch: mnist, resnet, seq2seq
ckpt: mnist, resnet, seq2seq
collective_timeout: mnist, resnet, seq2seq
columns: seq2seq
compile: mnist, resnet, seq2seq
cutmix: resnet
data_dir: mnist, resnet
data_file: seq2seq
dataset: mnist, resnet
deterministic: mnist, resnet, seq2seq
devices: mnist, resnet, seq2seq
download: mnist
dropout: seq2seq
ema: mnist, resnet, seq2seq
enable_checkpointing: mnist, resnet, seq2seq
enable_progress_bar: mnist, resnet, seq2seq
eval_batch_size: mnist, resnet, seq2seq
fast_dev_run: mnist, resnet, seq2seq
feedforward_size: seq2seq
flip: mnist
format: mnist, resnet, seq2seq
freeze_until: resnet
global_batch_size: mnist, resnet, seq2seq
gradient_clip_algorithm: mnist, resnet, seq2seq
gradient_clip_val: mnist, resnet, seq2seq
head_lr_factor: resnet
heads: seq2seq
hidden_size: seq2seq
image_size: resnet
label_smoothing: mnist, resnet, seq2seq
layer_lr_decay: resnet
length_penalty: seq2seq
limit_predict_batches: mnist, resnet, seq2seq
limit_test_batches: mnist, resnet, seq2seq
limit_train_batches: mnist, resnet, seq2seq
limit_val_batches: mnist, resnet, seq2seq
log_every_n_steps: mnist, resnet, seq2seq
logger: mnist, resnet, seq2seq
lr: mnist, resnet, seq2seq
lr_scale: mnist, resnet, seq2seq
master_addr: mnist, resnet, seq2seq
master_port: mnist, resnet, seq2seq
max_epochs: mnist, resnet, seq2seq
max_length: seq2seq
max_restarts: mnist, resnet, seq2seq
max_steps: mnist, resnet, seq2seq
max_time: mnist, resnet, seq2seq
max_tokens: seq2seq
mixup: resnet
momentum: mnist, resnet, seq2seq
name: mnist, resnet, seq2seq
network: mnist, seq2seq
node_rank: mnist, resnet, seq2seq
normalisation: seq2seq
num_classes: mnist, resnet
num_layers: seq2seq
num_nodes: mnist, resnet, seq2seq
num_sanity_val_steps: mnist, resnet, seq2seq
num_workers: resnet
on_bad_lines: seq2seq
on_corrupt: resnet
optimizer: mnist, resnet, seq2seq
optimizer_args: mnist, resnet, seq2seq
output: mnist, resnet, seq2seq
overfit_batches: mnist, resnet, seq2seq
patience: mnist, resnet, seq2seq
pixel_mean: resnet
pixel_std: resnet
precision: mnist, resnet, seq2seq
prefixes: seq2seq
profiler: mnist, resnet, seq2seq
progress_interval: mnist, resnet, seq2seq
rendezvous_timeout: mnist, resnet, seq2seq
resume: mnist, resnet, seq2seq
reverse: seq2seq
rotation: mnist
run_dir: mnist, resnet, seq2seq
save_every: mnist, resnet, seq2seq
save_top_k: mnist, resnet, seq2seq
scale: mnist
schedule: mnist, resnet, seq2seq
schedule_args: mnist, resnet, seq2seq
seed: mnist, resnet, seq2seq
shift: mnist
small_images: resnet
source_file: seq2seq
source_vocab_size: seq2seq
strategy: mnist, resnet, seq2seq
subwords: seq2seq
sync_bn: mnist, resnet, seq2seq
target_file: seq2seq
target_vocab_size: seq2seq
teacher_forcing: seq2seq
test_file: seq2seq
test_fraction: mnist, resnet, seq2seq
test_source_file: seq2seq
test_target_file: seq2seq
threads: mnist, resnet, seq2seq
top_k: mnist, resnet
trainer: mnist, resnet, seq2seq
unfreeze: resnet
val_check_interval: mnist, resnet, seq2seq
val_file: seq2seq
val_fraction: mnist, resnet, seq2seq
val_sentences: seq2seq
val_source_file: seq2seq
val_target_file: seq2seq
vocab_size: seq2seq
warmup: mnist, resnet, seq2seq
weight_decay: mnist, resnet, seq2seq
weights: mnist, resnet, seq2seq
weights_skip: mnist, resnet, seq2seq
"""


ALL_FLAGS = frozenset(line.partition(": ")[0] for line in _FLAGS.split("\n") if line)
"""The flags of all recipes of this package."""


def flag_names(recipe: str) -> list[str]:
    """Return the flags of a recipe of this package; none for another recipe.

    Example:
        >>> "freeze_until" in flag_names("resnet"), "freeze_until" in flag_names("mnist"), flag_names("mine")
        (True, False, [])
    """
    flags = (line.partition(": ") for line in _FLAGS.split("\n"))
    return [name for name, _, recipes in flags if recipe in recipes.split(", ")]
