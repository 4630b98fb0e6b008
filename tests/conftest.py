"""The quick tier: ``./run test --quick`` leaves out tests marked ``long``, those of the files below."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent

LONG = [
    "test_never_worse",
    "test_ratchets",
    "golden/test_golden",
    "capture/test_compile",
    "capture/test_functional",
    "capture/test_functional_compile",
    "comm/test_hangs",
    "comm/test_replicas",
    "decompose/test_async_refresh",
    "decompose/test_refresh_scheduler",
    "experimental/test_overlap",
    "experimental/test_staleness",
    "experimental/test_staleness_oracle",
    "factors/test_blocks",
    "factors/test_splitting",
    "factors/test_stacks",
    "precondition/test_adam_eigen",
    "precondition/test_adaptive",
    "precondition/test_blocks_adaptive",
    "precondition/test_rescale",
    "precondition/test_step_graphs",
    "runtime/test_elastic",
    "runtime/test_faults_ranks",
    "runtime/test_memory",
    "runtime/test_parity",
    "runtime/test_parity_processes",
    "runtime/test_sharded",
    "state/test_checkpoint_ranks",
    "state/test_saved_parts",
    "state/test_state",
    "tools/test_cli",
    "tools/test_compare_paths",
    "tools/test_demo",
    "tools/test_large_batch",
    "tools/test_recipes",
    "tools/test_run",
    "tools/test_run_ranks",
    "tools/test_scripts",
    "tools/test_selftest",
    "tools/test_run_paths",
    "workers/test_roles",
    "workers/test_strangers",
]
"""Files of ten seconds or more on one core."""

KEPT = [
    "test_a_run_comes_to_the_committed_values[adaptive-adam-one]",
    "test_a_run_comes_to_the_committed_values[spread-graphs]",
    "test_a_run_comes_to_the_committed_values[kfac-cholesky-one]",
    "test_a_run_comes_to_the_committed_values[ekfac-one]",
    "test_a_run_comes_to_the_committed_values[adaptive-adam-four]",
    "test_a_run_comes_to_the_committed_values[strategy-sharded-four]",
    "test_a_run_comes_to_the_committed_values[share-weights-four]",
    "test_factors_of_weights_that_functions_apply_equal_the_oracle[Translator]",
    "test_fullgraph_compiled_code_captures_what_the_oracle_computes[Swin]",
    "test_micro_batches_have_the_ekfac_moments_of_the_whole_batch[mean-(12,)]",
    "test_set_terms_holds_for_one_backward_pass",
    "test_layers_side_by_side_take_the_steps_of_the_oracle[linear-eigen]",
    "test_layers_side_by_side_take_the_steps_of_the_oracle[conv-groups-cholesky]",
    "test_a_state_is_a_copy_and_loading_it_back_is_bitwise[linear-warm-eigen]",
    "test_the_sum_over_patches_of_groups_and_padding_modes[zeros-3]",
    "test_a_worker_that_goes_is_noticed_and_nobody_waits_for_it",
    "test_strangers_at_the_hubs_door_keep_nobody_out",
]
"""Tests of these files that are part of the quick tier."""


def pytest_collection_modifyitems(items):
    for item in items:
        name = item.path.relative_to(HERE).with_suffix("").as_posix()
        if name in LONG and item.name not in KEPT:
            item.add_marker(pytest.mark.long)
