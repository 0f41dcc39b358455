//! Proofs over a program.
