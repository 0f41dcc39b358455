//! Reverse-mode transformation of the forward graph: backward ops, saved tensors, recompute.
