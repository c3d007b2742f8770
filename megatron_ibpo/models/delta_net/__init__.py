"""The gated delta net over packed sequences: the layer, and what ranks that share sequences pass on."""
