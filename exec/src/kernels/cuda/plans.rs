//! How each launch of a program is performed, resolved once: a launch finds its plan by its
//! instruction's number.

use super::blas::{self, WORKSPACE};
use super::code;
use super::codegen::{Entry, Param};
use super::dnn;
use super::gemm::Operands;
use super::start::Function;
use super::variant::Variant;
use indexmap::IndexMap;
use shardlab_plan::ir::{InstrId, KernelId, ShardOp};

/// Launches of generated code, one after another.
pub(super) type Entries = Vec<(Entry, Function)>;

/// How a variant is launched.
pub(super) enum Plan {
    /// Generated entries, one after another, and their bytes of scratch memory.
    Generated(Entries, u64),
    /// A GEMM.
    Gemm(Box<blas::Plan>, Operands),
    /// Attention, or a convolution, by cuDNN; then generated entries.
    Library(Box<dnn::Ready>, Entries),
    /// A list of ranges.
    Ranges(ShardOp),
    /// Nothing: there are no elements.
    Nothing,
}

// SAFETY: functions and descriptors belong to the context, not to a thread.
unsafe impl Send for Plan {}

impl Plan {
    pub(super) fn takes_tickets(&self) -> bool {
        matches!(self, Self::Generated(entries, _) if entries.iter().any(|(e, _)| e.params.contains(&Param::Tickets)))
    }

    /// Returns the bytes of scratch memory; those of lists of ranges depend on the launch.
    pub(super) fn scratch(&self) -> u64 {
        match self {
            Self::Generated(_, bytes) => *bytes,
            Self::Gemm(..) => WORKSPACE as u64,
            Self::Library(a, _) => a.scratch(),
            Self::Ranges(_) | Self::Nothing => 0,
        }
    }

    pub(super) fn describe(&self) -> String {
        match self {
            Self::Generated(entries, _) => format!("generated: {}", listed(entries)),
            Self::Gemm(plan, _) => plan.choice.clone(),
            Self::Library(a, then) if then.is_empty() => a.describe.clone(),
            Self::Library(a, then) => format!("{}; then {}", a.describe, listed(then)),
            Self::Ranges(op) => format!("generated: list of ranges for {}", op.name()),
            Self::Nothing => "nothing to do".to_owned(),
        }
    }
}

/// Describes entries.
fn listed(entries: &Entries) -> String {
    let each = entries.iter().map(|(e, f)| {
        let [x, y, z] = e.grid;
        format!(
            "{} of {} x {} threads, {}",
            e.name,
            u64::from(x) * u64::from(y) * u64::from(z),
            e.block,
            code::resources(f.raw)
        )
    });
    each.collect::<Vec<_>>().join("; ")
}

/// Position of a plan in [`Plans`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlanId(u32);

/// The plans of all variants, and the plan of each launch.
pub(super) struct Plans {
    all: IndexMap<Variant, Plan>,
    launches: Vec<Option<PlanId>>,
}

impl Plans {
    /// Reserves space for the launches of a program of `instrs` instructions.
    pub(super) fn new(instrs: usize) -> Self {
        Self {
            all: IndexMap::new(),
            launches: vec![None; instrs],
        }
    }

    /// Returns the plan of a variant, if there is one.
    pub(super) fn find(&self, variant: &Variant) -> Option<PlanId> {
        self.all.get_index_of(variant).map(|at| PlanId(at as u32))
    }

    /// Adds the plan of a variant, unless there is one.
    pub(super) fn add(&mut self, variant: Variant, plan: Plan) -> PlanId {
        let entry = self.all.entry(variant);
        let id = PlanId(entry.index() as u32);
        entry.or_insert(plan);
        id
    }

    /// Assigns a plan to a launch.
    pub(super) fn assign(&mut self, instr: InstrId, plan: PlanId) {
        self.launches[instr.index()] = Some(plan);
    }

    /// Returns the plan of a launch; `None` before it is prepared.
    pub(super) fn of_launch(&self, instr: InstrId) -> Option<PlanId> {
        self.launches.get(instr.index()).copied().flatten()
    }

    /// Returns the operands that a plan is for.
    pub(super) fn variant(&self, id: PlanId) -> &Variant {
        self.at(id).0
    }

    /// Returns a plan.
    pub(super) fn plan(&self, id: PlanId) -> &Plan {
        self.at(id).1
    }

    fn at(&self, id: PlanId) -> (&Variant, &Plan) {
        let found = self.all.get_index(id.0 as usize);
        found.expect("plans are added, never removed")
    }

    /// Returns the plans of a kernel, in the order of its variants.
    pub(super) fn of_kernel(&self, kernel: KernelId) -> Vec<&Plan> {
        let all = self.all.iter().filter(|(v, _)| v.kernel == kernel);
        let mut own: Vec<(&Variant, &Plan)> = all.collect();
        own.sort_by_key(|(v, _)| *v);
        own.into_iter().map(|(_, plan)| plan).collect()
    }
}
