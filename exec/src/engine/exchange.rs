//! What ranks of different processes tell one another after a pass.

use super::rank::PassReport;
use super::session::RankTimes;
use super::{ExecError, World};
use crate::process::{Reader, Writer};
use shardlab_plan::units::Bytes;
use std::time::Duration;

/// What every process must know of a rank's pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RankPass {
    pub(crate) losses: Vec<f32>,
    /// Square of the global gradient norm, where the program computes it.
    pub(crate) square: Option<f32>,
    pub(crate) squares: f64,
    /// Nanoseconds.
    pub(crate) duration: u64,
    /// Nanoseconds in which the host issued, waits left out.
    pub(crate) host: u64,
    pub(crate) peak_allocated: Bytes,
    pub(crate) peak_reserved: Bytes,
}

impl RankPass {
    fn of(report: &PassReport) -> Self {
        Self {
            losses: report.losses.clone(),
            square: report.square,
            squares: report.squares,
            duration: report.end.saturating_sub(report.start),
            host: report.host(),
            peak_allocated: report.memory.peak_allocated,
            peak_reserved: report.memory.peak_reserved,
        }
    }

    /// The pass in numbers, as that of this rank.
    pub(crate) fn times(&self, rank: u32) -> RankTimes {
        RankTimes {
            rank,
            time: Duration::from_nanos(self.duration),
            host: Duration::from_nanos(self.host),
            peak_allocated: self.peak_allocated,
            peak_reserved: self.peak_reserved,
        }
    }

    fn write(&self, w: &mut Writer) {
        w.u32(self.losses.len() as u32);
        self.losses.iter().for_each(|&l| w.f32(l));
        w.u8(u8::from(self.square.is_some()));
        w.f32(self.square.unwrap_or(0.0));
        w.f64(self.squares);
        w.u64(self.duration);
        w.u64(self.host);
        w.u64(self.peak_allocated.0);
        w.u64(self.peak_reserved.0);
    }

    fn read(r: &mut Reader<'_>) -> Option<Self> {
        let losses = r.list(Reader::f32)?;
        let has = r.u8()? != 0;
        let square = r.f32()?;
        Some(Self {
            losses,
            square: has.then_some(square),
            squares: r.f64()?,
            duration: r.u64()?,
            host: r.u64()?,
            peak_allocated: Bytes(r.u64()?),
            peak_reserved: Bytes(r.u64()?),
        })
    }
}

/// Brings the passes of all ranks together, by rank.
pub(crate) fn exchange(world: &World, local: &[PassReport]) -> Result<Vec<RankPass>, ExecError> {
    let mine: Vec<RankPass> = local.iter().map(RankPass::of).collect();
    if world.local().len() as u32 == world.size() {
        return Ok(mine);
    }
    let mut w = Writer::default();
    mine.iter().for_each(|p| p.write(&mut w));
    let all = world
        .peers()
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

    #[test]
    fn a_pass_keeps_its_bits() {
        for square in [None, Some(f32::from_bits(1))] {
            let pass = RankPass {
                losses: vec![1.5, -0.0],
                square,
                squares: 1e-300,
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
