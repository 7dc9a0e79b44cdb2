"""The policy: loading models, packing, the chunked log-prob head, losses, the train step."""
