"""Everything that has to be measured or proven on a GPU: ``python -m benchmarks.gpu``, in under ten minutes."""
