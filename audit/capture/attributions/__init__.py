"""What a logit depends on, beside attention: gradients, removal, sampled games, relevance."""
