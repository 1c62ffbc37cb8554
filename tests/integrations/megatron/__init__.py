from tests import megatron_cpu  # noqa: F401  (imports Megatron without compiling it, before any test module does)
