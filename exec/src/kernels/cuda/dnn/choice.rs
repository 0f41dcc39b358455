//! The choice among the library's candidates for a graph, by time: kept on disk, and the same on
//! all ranks.

use super::backend::{self, Machine, Plan, Wants};
use super::graph::{Direction, Graph, Kind, Node, Ty};
use super::{Dnn, ErrorKind};
use crate::kernels::cuda::blas::{BETTER, ahead};
use crate::kernels::cuda::cache::Cache;
use crate::kernels::cuda::memory::{Scratch, Stopwatch};
use crate::kernels::cuda::{Agree, Choose, agreed, numbers};
use cudarc::driver::result;
use shardlab_plan::ir::DType;

/// Number of candidates that are timed.
const OFFERS: usize = 12;

/// A candidate's position in the library's list, and its description in reports.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Choice {
    place: u16,
    text: String,
}

impl Choice {
    fn pack(&self) -> Vec<u8> {
        let place = self.place.to_le_bytes().into_iter();
        place.chain(self.text.bytes()).collect()
    }

    fn unpack(bytes: &[u8]) -> Option<Self> {
        let (place, text) = bytes.split_first_chunk()?;
        Some(Self {
            place: u16::from_le_bytes(*place),
            text: String::from_utf8(text.to_vec()).ok()?,
        })
    }
}

impl Dnn {
    /// Returns the fastest candidate for a graph, and its description: by the choice on disk, or by
    /// timing; if ranks agree, the leading rank's.
    pub(super) fn fastest(
        &self,
        graph: &Graph,
        wants: Wants,
        cache: &Cache,
        agree: Option<&dyn Agree>,
    ) -> Result<(Plan, String), ErrorKind> {
        let what = format!("{graph:?} {wants:?}");
        let key = Cache::key(&["cudnn 1", &self.machine, &what]);
        let name = format!("convolution {}", Cache::key(&[&what]));
        agreed(
            agree,
            (&name, &self.machine),
            &mut || self.choose(graph, wants, &key, cache),
            |packed| self.offer(graph, wants, packed),
        )
    }

    /// Returns the candidate that a packed choice names, if it exists.
    fn offer(&self, graph: &Graph, wants: Wants, packed: &[u8]) -> Option<(Plan, String)> {
        let choice = Choice::unpack(packed)?;
        let place = usize::from(choice.place);
        let on = Machine::Handle(self.handle);
        let mut offers = backend::offers(graph, on, wants, place + 1).ok()?;
        let named = offers.pop().filter(|_| offers.len() == place)?;
        Some((named, choice.text))
    }

    /// Makes this rank's own choice.
    fn choose(
        &self,
        graph: &Graph,
        wants: Wants,
        key: &str,
        cache: &Cache,
    ) -> Result<Vec<u8>, ErrorKind> {
        if let Some(kept) = cache.get(key, "engine")
            && self.offer(graph, wants, &kept).is_some()
        {
            return Ok(kept);
        }
        let untried = self.choose == Choose::First;
        let most = if untried { 1 } else { OFFERS };
        let offers = backend::offers(graph, Machine::Handle(self.handle), wants, most)?;
        let times = if offers.len() > 1 {
            self.bursts(graph, &offers)?
        } else {
            Vec::new()
        };
        let best = ahead(times.iter().copied(), BETTER);
        let time = best.map_or(String::new(), |i| format!(", {:.1} us alone", times[i]));
        let place = best.unwrap_or(0);
        let choice = Choice {
            place: place as u16,
            text: format!("offer {} of {}{time}", place + 1, offers.len()),
        };
        let packed = choice.pack();
        if !untried {
            cache.put(key, "engine", &packed);
        }
        Ok(packed)
    }

    /// Returns the microseconds of each candidate in a short burst; infinite for those that do not
    /// run.
    fn bursts(&self, graph: &Graph, offers: &[Plan]) -> Result<Vec<f32>, ErrorKind> {
        let most = offers.iter().map(|p| p.workspace).max().unwrap_or(0);
        let scratch = Scratch::new(graph.scratch + most, 0)?;
        let mut operands = Vec::new();
        for (i, t) in graph.tensors.iter().enumerate() {
            let bytes = t.bytes();
            let at = Scratch::new(bytes.next_multiple_of(256), 0)?;
            let dtype = match t.ty {
                Ty::Of(dtype) => dtype,
                Ty::I32 | Ty::Bool => DType::F32,
            };
            // Weights are smaller than what they multiply.
            let is_filter = matches!(graph.nodes[..], [Node::Convolution { direction, filter, .. }]
                if filter == i && direction != Direction::Filter);
            let scale = if is_filter { 0.02 } else { 1.0 };
            numbers::fill(at.at, bytes, dtype, scale, 7919 * (i + 1))?;
            operands.push(at);
        }
        // Copies within the device are not waited for.
        result::ctx::synchronize().map_err(ErrorKind::driver("cuCtxSynchronize"))?;
        let watch = Stopwatch::new()?;
        self.on(watch.stream())?;
        let address = |i: usize, kind: Kind| match kind {
            Kind::Scratch(n) => scratch.at + n,
            _ => operands[i].at,
        };
        let workspace = scratch.at + graph.scratch;
        watch.bursts(offers.len(), |i| {
            // SAFETY: the operands have the lengths of the graph's tensors, the workspace as any
            // candidate's; nothing else uses them.
            unsafe { offers[i].execute(self.handle, graph, address, workspace) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_comes_back_from_disk_and_rubbish_does_not() {
        let choice = Choice {
            place: 300,
            text: "offer 301 of 400".to_owned(),
        };
        assert_eq!(Choice::unpack(&choice.pack()), Some(choice));
        assert_eq!(Choice::unpack(&[1]), None);
        assert_eq!(Choice::unpack(&[1, 0, 0xff]), None);
    }
}
