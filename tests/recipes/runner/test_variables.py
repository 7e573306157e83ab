from recipes.runner.variables import (
    is_another_rank,
    job_name,
    names_a_rank,
    store_prefix_of_torchrun,
    without_local_rank,
)


def test_a_local_rank_flag_equal_to_its_variable_is_left_out() -> None:
    args = ["--lr", "1", "--local-rank=1", "--local_rank=1"]
    assert without_local_rank(args, {"LOCAL_RANK": "1"}) == ["--lr", "1"]
    assert without_local_rank(args, {"LOCAL_RANK": "0"}) == args
    assert without_local_rank(args, {}) == args


def test_rank_0_is_no_other_rank() -> None:
    assert names_a_rank({"RANK": "0"})
    assert not is_another_rank({"RANK": "0", "SLURM_PROCID": "0"})
    assert is_another_rank({"RANK": "0", "GROUP_RANK": "1"})
    assert not names_a_rank({"SLURM_JOB_ID": "7"})


def test_the_first_step_has_the_name_of_its_job() -> None:
    job = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"}
    assert job_name(job | {"SLURM_STEP_ID": "4294967291"}) == job_name(job | {"SLURM_STEP_ID": "0"}) == "slurm-17"


def test_each_start_by_torchrun_has_its_own_store_keys() -> None:
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert store_prefix_of_torchrun(env) == "lightning_recipes/2"
    assert store_prefix_of_torchrun(env | {"TORCHELASTIC_USE_AGENT_STORE": "False"}) == ""
