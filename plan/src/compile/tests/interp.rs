//! A tiny float64 interpreter of tapes: executes kernel bodies op by op, in the order and memory
//! the tape prescribes. Fresh storages hold NaN, so that a read before a write shows.

use super::*;
use crate::ir::{PushedRows, SelectedRows};

/// Deterministic numbers in (-1, 1).
pub(super) struct Rng(pub(super) u64);

impl Rng {
    pub(super) fn next(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// Values of parameters and inputs.
#[derive(Clone)]
pub(super) struct Inputs {
    pub(super) params: Vec<Vec<f64>>,
    pub(super) consts: Vec<Vec<f64>>,
}

impl Inputs {
    pub(super) fn new(t: &Tape, vocab: u64) -> Self {
        let mut rng = Rng(7);
        let params = t
            .params
            .iter()
            .map(|p| (0..p.numel()).map(|_| 0.7 * rng.next()).collect())
            .collect();
        let consts = t
            .consts
            .iter()
            .map(|c| {
                let n = c.bytes.0 / c.dtype.size();
                // The same values in every tape that has a constant of this name.
                let mut rng = Rng(c
                    .name
                    .bytes()
                    .fold(7, |h, b| h.wrapping_mul(31).wrapping_add(b.into())));
                (0..n)
                    .map(|i| match c.name {
                        "tokens" => ((rng.next() + 1.0) / 2.0 * vocab as f64).floor(),
                        "positions" | "rows" => i as f64,
                        _ => rng.next(),
                    })
                    .collect()
            })
            .collect();
        Self { params, consts }
    }
}

/// Loss and gradients.
pub(super) struct Outcome {
    pub(super) loss: f64,
    pub(super) grads: Vec<Vec<f64>>,
}

struct Machine<'t> {
    t: &'t Tape,
    inputs: &'t Inputs,
    storages: Vec<Vec<f64>>,
    grads: Vec<Vec<f64>>,
    loss: f64,
}

/// Runs forward and backward.
pub(super) fn train(t: &Tape, inputs: &Inputs) -> Outcome {
    let mut m = Machine::new(t, inputs);
    m.run(&t.forward);
    m.run(&t.backward);
    Outcome {
        loss: m.loss,
        grads: m.grads,
    }
}

/// Runs forward and backward on ranks along one axis, each with its own inputs.
pub(super) fn train_ranks(t: &Tape, inputs: &[Inputs]) -> Vec<Outcome> {
    let mut ranks: Vec<Machine<'_>> = inputs.iter().map(|i| Machine::new(t, i)).collect();
    run_together(&mut ranks, &t.forward);
    run_together(&mut ranks, &t.backward);
    let outcome = |m: Machine<'_>| Outcome {
        loss: m.loss,
        grads: m.grads,
    };
    ranks.into_iter().map(outcome).collect()
}

/// Returns the losses of ranks along one axis.
pub(super) fn losses_of_ranks(t: &Tape, inputs: &[Inputs], eval: bool) -> Vec<f64> {
    let mut ranks: Vec<Machine<'_>> = inputs.iter().map(|i| Machine::new(t, i)).collect();
    run_together(&mut ranks, if eval { &t.eval } else { &t.forward });
    let loss = t.loss.expect("a tape has a loss").index();
    let of = |m: &Machine<'_>| if eval { m.loss } else { m.storages[loss][0] };
    ranks.iter().map(of).collect()
}

/// Runs ranks in lockstep; collectives exchange their data.
fn run_together(ranks: &mut [Machine<'_>], ops: &[TapeOp]) {
    for op in ops {
        let TapeOp::Collective {
            collective,
            dtype,
            operands,
        } = *op
        else {
            for m in ranks.iter_mut() {
                m.run(std::slice::from_ref(op));
            }
            continue;
        };
        let (from, to) = (operands as usize, operands as usize + 1);
        let size = dtype.size();
        let sent: Vec<Vec<f64>> = ranks
            .iter()
            .map(|m| m.read(&m.t.operands[from], size))
            .collect();
        let at = (operands as usize, size);
        match collective.rows {
            Some(SelectedRows::Pushed(of)) => {
                push(ranks, (collective.kind, of), at, &sent);
                continue;
            }
            Some(SelectedRows::Counted(of)) => {
                exchange_counted(ranks, of.rows as usize, at, &sent);
                continue;
            }
            None => {}
        }
        let n = sent.len();
        let sum = |i: usize| sent.iter().map(|s| s[i]).sum::<f64>();
        let part = sent[0].len() / n;
        for (r, m) in ranks.iter_mut().enumerate() {
            let mine = r * part..(r + 1) * part;
            let got: Vec<f64> = match collective.kind {
                CollectiveKind::AllGather => sent.concat(),
                CollectiveKind::AllReduce => (0..sent[0].len()).map(sum).collect(),
                CollectiveKind::ReduceScatter => mine.map(sum).collect(),
                CollectiveKind::AllToAll => {
                    let of = |s: &Vec<f64>| s[mine.clone()].to_vec();
                    sent.iter().flat_map(of).collect()
                }
                kind => unreachable!("{kind:?} names its rows"),
            };
            let made = vec![true; got.len()];
            let to = m.t.operands[to];
            assert_eq!(to.bytes / size, got.len() as u64, "{collective:?}");
            m.write(&to, size, got, &made);
        }
    }
}

/// Exchanges the first rows of each block, as many as the sender has counted; others stay as they
/// were.
fn exchange_counted(
    ranks: &mut [Machine<'_>],
    rows: usize,
    (operands, size): (usize, u64),
    sent: &[Vec<f64>],
) {
    let n = ranks.len();
    let block = rows / n;
    let counts = |m: &Machine<'_>, operand: usize, rank: usize| {
        let all = m.read(&m.t.operands[operand], 8);
        let of_rank = &all[rank * all.len() / n..(rank + 1) * all.len() / n];
        (of_rank.iter().sum::<f64>() as usize).min(block)
    };
    let of_pairs = |operand: usize| -> Vec<Vec<usize>> {
        let of = |m| (0..n).map(|rank| counts(m, operand, rank)).collect();
        ranks.iter().map(of).collect()
    };
    let (sends, receives) = (of_pairs(operands + 2), of_pairs(operands + 3));
    for (to, m) in ranks.iter_mut().enumerate() {
        let at = m.t.operands[operands + 1];
        let mut got = m.read(&at, size);
        let width = got.len() / rows;
        let mut made = vec![false; got.len()];
        for (from, sent) in sent.iter().enumerate() {
            assert_eq!(sends[from][to], receives[to][from]);
            let elements = sends[from][to] * width;
            let (source, place) = (to * block * width, from * block * width);
            got[place..][..elements].copy_from_slice(&sent[source..][..elements]);
            made[place..][..elements].fill(true);
        }
        m.write(&at, size, got, &made);
    }
}

/// Pushes the rows for which a rank has one of the chosen experts; others stay as they were.
fn push(
    ranks: &mut [Machine<'_>],
    (kind, of): (CollectiveKind, PushedRows),
    (operands, size): (usize, u64),
    sent: &[Vec<f64>],
) {
    let (n, rows) = (ranks.len(), of.rows as usize);
    let tokens = rows / n;
    let choices: Vec<Vec<f64>> = ranks
        .iter()
        .map(|m| m.read(&m.t.operands[operands + 2], 8))
        .collect();
    let k = choices[0].len() / rows;
    for (to, m) in ranks.iter_mut().enumerate() {
        let at = m.t.operands[operands + 1];
        let mut got = m.read(&at, size);
        let width = got.len() / rows;
        let mut made = vec![false; got.len()];
        for (from, sent) in sent.iter().enumerate() {
            for t in 0..tokens {
                let row = to * tokens + t;
                let chosen = &choices[from][row * k..][..k];
                if !chosen.iter().any(|c| (0.0..of.experts as f64).contains(c)) {
                    continue;
                }
                let source = if kind == CollectiveKind::PeerPush {
                    t
                } else {
                    row
                };
                let place = (from * tokens + t) * width;
                got[place..][..width].copy_from_slice(&sent[source * width..][..width]);
                made[place..][..width].fill(true);
            }
        }
        m.write(&at, size, got, &made);
    }
}

/// Returns the loss of the forward list, or of the validation forward.
pub(super) fn loss(t: &Tape, inputs: &Inputs, eval: bool) -> f64 {
    let mut m = Machine::new(t, inputs);
    if eval {
        m.run(&t.eval);
        return m.loss;
    }
    m.run(&t.forward);
    m.storages[t.loss.expect("a tape has a loss").index()][0]
}

impl<'t> Machine<'t> {
    fn new(t: &'t Tape, inputs: &'t Inputs) -> Self {
        let grads = t
            .params
            .iter()
            .map(|p| vec![f64::NAN; p.numel() as usize])
            .collect();
        Self {
            t,
            inputs,
            storages: vec![vec![]; t.storages.len()],
            grads,
            loss: f64::NAN,
        }
    }

    fn run(&mut self, ops: &[TapeOp]) {
        for op in ops {
            match *op {
                TapeOp::Alloc(s) => {
                    let st = &self.t.storages[s.index()];
                    self.storages[s.index()] =
                        vec![f64::NAN; (st.bytes.0 / st.dtype.size()) as usize];
                }
                TapeOp::Free(s) => {
                    let values = std::mem::take(&mut self.storages[s.index()]);
                    if [self.t.loss, self.t.eval_loss].contains(&Some(s)) {
                        self.loss = values[0];
                    }
                }
                TapeOp::Launch {
                    kernel,
                    reads,
                    writes,
                    end,
                } => {
                    let kernel = &self.t.kernels[kernel.index()];
                    let ops = &self.t.operands;
                    self.launch(
                        kernel,
                        &ops[reads as usize..writes as usize],
                        &ops[writes as usize..end as usize],
                    );
                }
                TapeOp::Collective { .. } => panic!("one rank has no peer to communicate with"),
                _ => {}
            }
        }
    }

    fn read(&self, o: &Operand, size: u64) -> Vec<f64> {
        let range = (o.offset / size) as usize..((o.offset + o.bytes) / size) as usize;
        // Parameters are contiguous, and so are gradients: an operand may extend into those that
        // follow.
        let across = |all: &[Vec<f64>]| -> Vec<f64> {
            let elements = all.iter().flatten().copied();
            elements.skip(range.start).take(range.len()).collect()
        };
        match o.source {
            Source::Param(p) => across(&self.inputs.params[p.index()..]),
            Source::Grad(p) => across(&self.grads[p.index()..]),
            Source::Const(c) => self.inputs.consts[c.index()][range].to_vec(),
            Source::Storage(id) => self.storages[id.index()][range].to_vec(),
            Source::Scale(p) | Source::ColumnCodes(p) | Source::ColumnScale(p) => {
                panic!("no tape here gathers parameter {} in 8 bits", p.0)
            }
        }
    }

    /// Writes those values that the launch has made: operands may be interleaved with one another's
    /// rows.
    fn write(&mut self, o: &Operand, size: u64, values: Vec<f64>, made: &[bool]) {
        let at = (o.offset / size) as usize;
        let all = match o.source {
            Source::Storage(id) => &mut self.storages[id.index()..=id.index()],
            Source::Grad(p) => &mut self.grads[p.index()..],
            Source::Param(_)
            | Source::Scale(_)
            | Source::ColumnCodes(_)
            | Source::ColumnScale(_)
            | Source::Const(_) => unreachable!("never written"),
        };
        let places = all.iter_mut().flatten().skip(at);
        for ((to, value), made) in places.zip(values).zip(made) {
            if *made {
                *to = value;
            }
        }
    }

    fn launch(&mut self, k: &Kernel, reads: &[Operand], writes: &[Operand]) {
        let size_of = |place: Place| {
            let slots = || {
                k.body
                    .iter()
                    .flat_map(|b| b.inputs.iter().chain(&b.outputs))
            };
            slots()
                .find(|s| s.place == place)
                .expect("every operand is used")
                .dtype
                .size()
        };
        let rd: Vec<Vec<f64>> = reads
            .iter()
            .enumerate()
            .map(|(i, o)| self.read(o, size_of(Place::Read(i as u8))))
            .collect();
        let mut wr: Vec<Vec<f64>> = writes
            .iter()
            .enumerate()
            .map(|(i, o)| self.read(o, size_of(Place::Write(i as u8))))
            .collect();
        let mut made: Vec<Vec<bool>> = wr.iter().map(|w| vec![false; w.len()]).collect();
        let mut regs: Vec<Vec<f64>> = vec![];
        for op in &k.body {
            let ins: Vec<Vec<f64>> = op
                .inputs
                .iter()
                .map(|s| {
                    let from = match s.place {
                        Place::Read(i) => &rd[i as usize],
                        Place::Write(i) => &wr[i as usize],
                        Place::Register(i) => &regs[i as usize],
                    };
                    index(s).into_iter().map(|i| from[i]).collect()
                })
                .collect();
            for (s, values) in op.outputs.iter().zip(super::semantics::apply(op, &ins)) {
                let at = index(s);
                assert_eq!(at.len(), values.len(), "{:?}", op.op);
                let to = match s.place {
                    Place::Write(i) => {
                        at.iter().for_each(|&k| made[i as usize][k] = true);
                        &mut wr[i as usize]
                    }
                    Place::Register(i) => {
                        regs.resize(regs.len().max(i as usize + 1), vec![]);
                        let need = at.iter().max().map_or(0, |m| m + 1);
                        let reg = &mut regs[i as usize];
                        reg.resize(reg.len().max(need), f64::NAN);
                        reg
                    }
                    Place::Read(_) => unreachable!("reads are not written"),
                };
                for (i, v) in at.into_iter().zip(values) {
                    to[i] = v;
                }
            }
        }
        for (i, (o, values)) in writes.iter().zip(wr).enumerate() {
            self.write(o, size_of(Place::Write(i as u8)), values, &made[i]);
        }
    }
}

/// Returns the element positions of a slot in logical order.
fn index(s: &Slot) -> Vec<usize> {
    let strides: Vec<u64> = if s.strides.is_empty() {
        crate::ir::strides::contiguous(&s.shape).to_vec()
    } else {
        s.strides.to_vec()
    };
    let mut out = vec![s.offset as usize];
    for (&n, &st) in s.shape.iter().zip(&strides) {
        out = out
            .iter()
            .flat_map(|&b| (0..n).map(move |i| b + (i * st) as usize))
            .collect();
    }
    out
}
