//! Weights from a seed, equal for every mesh, strategy, policy and precision.
//!
//! Element e of a parameter is the e-th value of the parameter's own sequence, so every shard is
//! generated independently, and nothing larger than a shard exists at any time. Token transformers
//! are initialized like GPT-2: matrices normal with standard deviation 0.02, norm weights 1, biases
//! 0. Regression families are initialized like torch's `nn.Linear` and `nn.Conv2d`: uniform within
//! 1 / sqrt(fan in), including biases.

use super::TrainError;
use super::layout::StateLayout;
use super::state::StateIo;
use crate::base::random::Sequence;
use rayon::iter::{IndexedParallelIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;
use shardlab_plan::Program;
use shardlab_plan::ir::{Init, Param, ParamId};
use std::ops::Range;

/// Standard deviation of matrices.
const STD: f64 = 0.02;

/// Initialization of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Start {
    Constant(f32),
    Normal(f64),
    Uniform(f64),
}

/// Writes initial weights of all parameters on all ranks.
///
/// # Errors
/// If a buffer of a weight cannot be written.
pub(crate) fn from_seed(
    program: &Program,
    layout: &StateLayout,
    seed: u64,
    io: &mut dyn StateIo,
) -> Result<(), TrainError> {
    write(program, layout, (seed, &|_| true), io, |start, sequence| {
        move |elements| values(start, &sequence, elements)
    })
}

/// Writes initial weights of adapters on all ranks.
///
/// # Errors
/// If a buffer of a weight cannot be written.
pub(super) fn adapters_from_seed(
    program: &Program,
    layout: &StateLayout,
    seed: u64,
    io: &mut dyn StateIo,
) -> Result<(), TrainError> {
    let which = (seed, &Param::is_adapter as &dyn Fn(&Param) -> bool);
    write(program, layout, which, io, |start, sequence| {
        move |elements| values(start, &sequence, elements)
    })
}

/// Like [`from_seed`], but the values of a parameter repeat after [`PERIOD`]: for timing, where
/// generating billions of values would take longer than the measurement.
///
/// # Errors
/// If a buffer of a weight cannot be written.
pub(crate) fn repeating(
    program: &Program,
    layout: &StateLayout,
    seed: u64,
    io: &mut dyn StateIo,
) -> Result<(), TrainError> {
    write(program, layout, (seed, &|_| true), io, |start, sequence| {
        let table = values(start, &sequence, 0..PERIOD);
        move |elements| repeated(&table, elements)
    })
}

/// Writes the values that `of` computes from the initialization and the sequence of every parameter
/// that is wanted.
fn write<V: Fn(Range<u64>) -> Vec<f32>>(
    program: &Program,
    layout: &StateLayout,
    (seed, wanted): (u64, &dyn Fn(&Param) -> bool),
    io: &mut dyn StateIo,
    of: impl Fn(Start, Sequence) -> V,
) -> Result<(), TrainError> {
    let params = (0u32..).zip(&program.params);
    for (p, param) in params.filter(|(_, param)| wanted(param)) {
        let start = start(param);
        let values = of(start, Sequence::new(seed, &param.name));
        layout.set_param(io, (ParamId(p), param), &mut |elements| {
            Ok(values(elements))
        })?;
    }
    Ok(())
}

/// Returns elements of an endless repetition of a table.
fn repeated(table: &[f32], elements: Range<u64>) -> Vec<f32> {
    let offset = (elements.start % table.len() as u64) as usize;
    let mut all = vec![0.0; (elements.end - elements.start) as usize];
    all.par_chunks_mut(table.len()).for_each(|piece| {
        let (one, next) = piece.split_at_mut(piece.len().min(table.len() - offset));
        one.copy_from_slice(&table[offset..][..one.len()]);
        next.copy_from_slice(&table[..next.len()]);
    });
    all
}

fn start(param: &Param) -> Start {
    match param.init {
        Init::Zeros => Start::Constant(0.0),
        Init::Ones => Start::Constant(1.0),
        Init::Normal => Start::Normal(STD),
        Init::Uniform { fan_in } => Start::Uniform(1.0 / (fan_in as f64).sqrt()),
    }
}

/// Number of elements after which values repeat in [`repeating`]: not a multiple of any row's
/// length.
const PERIOD: u64 = (1 << 20) + 7;
/// Number of elements that one thread generates at a time.
const PIECE: u64 = 1 << 16;

fn values(start: Start, sequence: &Sequence, elements: Range<u64>) -> Vec<f32> {
    let n = (elements.end - elements.start) as usize;
    if let Start::Constant(v) = start {
        return vec![v; n];
    }
    let mut all = vec![0.0; n];
    // Values depend on their position alone, so pieces may be generated in any order.
    all.par_chunks_mut(PIECE as usize)
        .enumerate()
        .for_each(|(i, piece)| {
            let from = elements.start + i as u64 * PIECE;
            fill(start, sequence.clone(), from, piece);
        });
    all
}

fn fill(start: Start, mut sequence: Sequence, from: u64, piece: &mut [f32]) {
    match start {
        Start::Constant(v) => piece.fill(v),
        Start::Normal(std) => {
            sequence.seek(2 * from);
            piece
                .iter_mut()
                .for_each(|x| *x = (std * sequence.normal()) as f32);
        }
        Start::Uniform(bound) => {
            sequence.seek(from);
            piece
                .iter_mut()
                .for_each(|x| *x = (bound * (2.0 * sequence.uniform() - 1.0)) as f32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::testing::{BASE, Memory, scenario_of};

    /// Returns all initial weights of a program, by parameter.
    fn weights(set: &[&str], seed: u64) -> Vec<Vec<f32>> {
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        let scenario = scenario_of(BASE[1], &set);
        let program = shardlab_plan::plan(&scenario).unwrap();
        let layout = StateLayout::new(&program).unwrap();
        let mut memory = Memory::new(&program);
        from_seed(&program, &layout, seed, &mut memory).unwrap();
        (0..program.params.len() as u32)
            .map(|p| layout.weights(&mut memory, ParamId(p)).unwrap())
            .collect()
    }

    #[test]
    fn a_repetition_begins_and_ends_anywhere() {
        let all = |elements| repeated(&[0.0, 1.0, 2.0], elements);
        assert_eq!(all(4..12), [1.0, 2.0, 0.0, 1.0, 2.0, 0.0, 1.0, 2.0]);
        assert_eq!(all(2..3), [2.0]);
        assert_eq!(all(3..3), [0.0; 0]);
    }

    #[test]
    fn weights_do_not_depend_on_the_mesh() {
        let reference = weights(&["mesh.dp_shard=1"], 5);
        for set in [
            &["mesh.dp_shard=3", "mesh.gpus_per_node=3"][..],
            &[
                "mesh.dp_shard=2",
                "mesh.dp_outer=2",
                "fsdp.outer_strategy=optim",
            ],
            &["mesh.dp_shard=4", "fsdp.policy=fsdp2"],
            &[
                "mesh.dp_shard=4",
                "fsdp.policy=megatron",
                "fsdp.strategy=optim",
            ],
            &["fsdp.strategy=no_shard", "precision.compute=bf16"],
        ] {
            assert_eq!(weights(set, 5), reference, "{set:?}");
        }
        assert_ne!(weights(&[], 6), reference);
        let bf16 = weights(&["precision.compute=bf16", "precision.main_params=none"], 5);
        for (a, b) in reference.iter().flatten().zip(bf16.iter().flatten()) {
            assert_eq!(half::bf16::from_f32(*a).to_f32(), *b);
        }
    }

    /// Initialization needs no more memory than one rank's shard of a unit in addition to resident
    /// state.
    #[test]
    fn only_shards_are_made() {
        for set in [
            &["mesh.dp_shard=4"][..],
            &["mesh.dp_shard=4", "fsdp.policy=fsdp2"],
        ] {
            let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
            let scenario = scenario_of(BASE[0], &set);
            let program = shardlab_plan::plan(&scenario).unwrap();
            let layout = StateLayout::new(&program).unwrap();
            let mut memory = Memory::new(&program);
            from_seed(&program, &layout, 0, &mut memory).unwrap();
            let shards = program.groups.iter().map(|g| 4 * g.layout.shard_numel());
            let shard = shards.max().unwrap();
            let written = memory.largest_write as u64;
            assert!(written > 0 && written <= shard, "{written} of {shard}");
        }
    }

    #[test]
    fn kinds_of_parameters() {
        let scenario = scenario_of(BASE[1], &[]);
        let program = shardlab_plan::plan(&scenario).unwrap();
        let all = weights(&[], 1);
        let of = |name: &str| &all[program.params.iter().position(|p| p.name == name).unwrap()];
        assert!(
            of("layers.0.attention.ln_1.weight")
                .iter()
                .all(|v| *v == 1.0)
        );
        assert!(of("norm.bias").iter().all(|v| *v == 0.0));
        assert!(of("layers.1.mlp.c_fc.bias").iter().all(|v| *v == 0.0));
        let matrices: Vec<f64> = program
            .params
            .iter()
            .zip(&all)
            .filter(|(p, _)| p.shape.len() == 2)
            .flat_map(|(_, w)| w.iter().map(|v| f64::from(*v)))
            .collect();
        let n = matrices.len() as f64;
        let std = (matrices.iter().map(|v| v * v).sum::<f64>() / n).sqrt();
        // Four standard errors.
        assert!((std / STD - 1.0).abs() < 4.0 / (2.0 * n).sqrt(), "{std}");
        assert_ne!(
            of("layers.0.mlp.c_fc.weight"),
            of("layers.1.mlp.c_fc.weight")
        );
    }
}
