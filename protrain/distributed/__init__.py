"""Several processes that train one model: who they are, what they do together, and what they must agree on."""
