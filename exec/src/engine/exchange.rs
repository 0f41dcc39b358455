//! Exchange of the results of a pass between processes.

use super::ExecError;
use super::pass::{PassReport, RankPass};
use crate::process::{Reader, World, Writer};

/// Gathers the results of all ranks, in rank order.
///
/// # Errors
/// [`ExecError`], if a process fails or has another number of ranks.
pub(crate) fn exchange(world: &World, local: &[PassReport]) -> Result<Vec<RankPass>, ExecError> {
    let mine: Vec<RankPass> = local.iter().map(RankPass::of).collect();
    if world.local().len() as u32 == world.size() {
        return Ok(mine);
    }
    let mut w = Writer::default();
    mine.iter().for_each(|p| p.write(&mut w));
    let all = world
        .process_group()
        .all_gather("pass", w.0)
        .map_err(ExecError::Peers)?;
    let share = world.local().len();
    let mut passes = Vec::with_capacity(world.size() as usize);
    for data in all {
        let mut r = Reader(&data);
        for _ in 0..share {
            let pass = RankPass::read(&mut r).ok_or_else(|| {
                ExecError::Device("another process sent an unreadable report".to_owned())
            })?;
            passes.push(pass);
        }
        if !r.done() {
            let what = "another process has more ranks than this one".to_owned();
            return Err(ExecError::Device(what));
        }
    }
    Ok(passes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::units::Bytes;

    #[test]
    fn a_pass_round_trips_bit_for_bit() {
        for square in [None, Some(f32::from_bits(1))] {
            let pass = RankPass {
                losses: vec![1.5, -0.0],
                square,
                squares: 1e-300,
                part_squares: vec![0.25, f32::MAX],
                counts: vec![vec![1, u32::MAX], Vec::new()],
                duration: u64::MAX,
                host: 3,
                peak_allocated: Bytes(5),
                peak_reserved: Bytes(7),
            };
            let mut w = Writer::default();
            pass.write(&mut w);
            assert_eq!(RankPass::read(&mut Reader(&w.0)), Some(pass));
        }
    }
}
