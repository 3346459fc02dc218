"""Training in several processes: pipelines, data parallel, sharded, tensor and sequence parallel."""
