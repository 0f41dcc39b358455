//! The modules and parameters of a declared model.

use super::Layer;
use crate::config::pattern::covers;
use crate::config::{Lora, Train};
use crate::ir::{
    DType, Module, ModuleId, ModuleKind, Packed, PackedFormat, PackedScales, Param, ParamId,
};
use crate::recipes::BlockPlace;
use smallvec::smallvec;

/// The repeated blocks of a model whose blocks are all alike, as ranges in the tables of a
/// [`Tree`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// Number of blocks.
    pub(crate) count: u32,
    /// Module of the first block.
    pub(crate) module: u32,
    /// Number of modules of one block.
    pub(crate) modules: u32,
    /// First parameter of the first block.
    pub(crate) param: u32,
    /// Number of parameters of one block.
    pub(crate) params: u32,
}

impl Blocks {
    /// Returns the block that a module is part of.
    pub(crate) fn block_of(&self, m: ModuleId) -> Option<u32> {
        let inside = self.module..self.module + self.count * self.modules;
        inside
            .contains(&m.0)
            .then(|| (m.0 - self.module) / self.modules)
    }
}

/// Modules in pre-order, parameters in registration order.
#[derive(Clone, Debug)]
pub(crate) struct Tree {
    pub(crate) modules: Vec<Module>,
    pub(crate) params: Vec<Param>,
    /// Weight and bias of each module.
    pub(super) own: Vec<[Option<ParamId>; 2]>,
    /// First module and first parameter of each block, and of what follows the last one.
    pub(super) starts: Vec<(ModuleId, ParamId)>,
    /// Linear layers that can have an adapter.
    pub(super) linears: Vec<Linear>,
    /// Rows per sample that each module works on, if they are not the tokens.
    pub(super) rows: Vec<Option<u64>>,
    /// Whether a module's weight is looked up or added, by module ([`Declare::lookup`]).
    ///
    /// [`Declare::lookup`]: super::Declare::lookup
    pub(super) lookups: Vec<bool>,
    /// Whether a module is part of a block that the forward skips, by module; empty if it skips
    /// none.
    pub(crate) skipped: Vec<bool>,
    /// Whether the code of all blocks is the same, and only the next block uses the results of a
    /// block.
    pub(crate) same_code: bool,
}

/// A linear layer that can have an adapter.
#[derive(Clone, Debug)]
pub(super) struct Linear {
    pub(super) layer: ModuleId,
    /// Path in Hugging Face's code.
    pub(super) hf: String,
    pub(super) adapter: Option<Adapter>,
}

/// The layers of an adapter: `A` of shape `[r, in]`, `B` of shape `[out, r]`, and with DoRA the
/// lengths of rows, `[out]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Adapter {
    pub(crate) a: Layer,
    pub(crate) b: Layer,
    pub(crate) magnitude: Option<Layer>,
    /// Factor of the result.
    pub(crate) scaling: f64,
}

impl Tree {
    /// Returns the number of repeated blocks.
    pub(crate) fn layers(&self) -> u32 {
        self.starts.len().saturating_sub(1) as u32
    }

    /// Returns the block that a module is part of.
    pub(crate) fn block_of(&self, m: ModuleId) -> Option<u32> {
        let after = self.starts.partition_point(|&(first, _)| first <= m);
        let inside = after > 0 && after < self.starts.len();
        inside.then(|| after as u32 - 1)
    }

    /// Returns the place of the block that a parameter's module is part of.
    pub(crate) fn block_place(&self, p: &Param) -> Option<BlockPlace> {
        let number = self.block_of(*p.modules.first()?)?;
        let count = self.layers();
        Some(BlockPlace { number, count })
    }

    /// Returns where the blocks are if all have the same modules and parameters; `None` if some
    /// differ or there are none.
    pub(crate) fn blocks(&self) -> Option<Blocks> {
        let [first, second, ..] = self.starts[..] else {
            return None;
        };
        if !self.same_code {
            return None;
        }
        let blocks = Blocks {
            count: self.layers(),
            module: first.0.0,
            modules: second.0.0 - first.0.0,
            param: first.1.0,
            params: second.1.0 - first.1.0,
        };
        let alike = (0u32..).zip(&self.starts).all(|(n, at)| {
            at.0.0 == blocks.module + n * blocks.modules
                && at.1.0 == blocks.param + n * blocks.params
        });
        let (modules, params) = (blocks.modules as usize, blocks.params as usize);
        let kinds = |n: usize| {
            let start = blocks.module as usize + n * modules;
            self.modules[start..start + modules].iter().map(|m| m.kind)
        };
        let shapes = |n: usize| {
            let start = blocks.param as usize + n * params;
            let params = self.params[start..start + params].iter();
            params.map(|p| (&p.shape, p.placements, p.is_adapter()))
        };
        let scalings = |n: usize| {
            let [first, after] = [self.starts[n].0, self.starts[n + 1].0];
            let inside = self
                .linears
                .iter()
                .filter(move |l| (first..after).contains(&l.layer));
            inside.map(|l| l.adapter.map(|a| a.scaling))
        };
        let same =
            |n| kinds(n).eq(kinds(0)) && shapes(n).eq(shapes(0)) && scalings(n).eq(scalings(0));
        (alike && (1..blocks.count as usize).all(same)).then_some(blocks)
    }

    /// Returns the rows per sample that a module works on, if they are not the tokens.
    pub(crate) fn rows(&self, m: ModuleId) -> Option<u64> {
        self.rows[m.index()]
    }

    /// Leaves out the blocks whose paths `which` holds for.
    pub(crate) fn skip(&mut self, which: impl Fn(&str) -> bool) {
        let mut skipped = vec![false; self.modules.len()];
        for pair in self.starts.windows(2) {
            let (first, after) = (pair[0].0.index(), pair[1].0.index());
            if which(&self.modules[first].path) {
                skipped[first..after].fill(true);
            }
        }
        if skipped.contains(&true) {
            self.skipped = skipped;
        }
    }

    /// Returns whether the forward skips a module.
    pub(crate) fn skips(&self, m: ModuleId) -> bool {
        self.skipped.get(m.index()).is_some_and(|&skipped| skipped)
    }

    /// Returns whether the forward skips all modules that use a parameter.
    pub(crate) fn skips_param(&self, p: &Param) -> bool {
        p.modules.iter().all(|&m| self.skips(m))
    }

    /// Returns how many modules that the forward runs multiply their input by a parameter. Blocks
    /// may share it. A tied table is multiplied once, as the head.
    pub(crate) fn multiplications(&self, p: &Param) -> u64 {
        let run = p.modules.iter().filter(|&&m| !self.skips(m));
        run.filter(|m| !self.lookups[m.index()]).count() as u64
    }

    /// Returns the numbers of the blocks that the forward runs.
    pub(crate) fn run_layers(&self) -> impl Iterator<Item = usize> {
        let blocks = self.starts.iter().take(self.layers() as usize);
        let numbered = blocks.enumerate();
        numbered.filter_map(|(n, &(m, _))| (!self.skips(m)).then_some(n))
    }

    /// Returns the weight of a layer.
    ///
    /// # Panics
    /// Never: a [`Layer`] is made with a weight.
    pub(crate) fn weight(&self, layer: Layer) -> ParamId {
        self.own[layer.0.index()][0].expect("a layer has a weight")
    }

    /// Returns the bias of a layer, if it has one.
    pub(crate) fn bias(&self, layer: Layer) -> Option<ParamId> {
        self.own[layer.0.index()][1]
    }

    /// Returns the adapter of a layer, if it has one.
    pub(crate) fn adapter(&self, layer: Layer) -> Option<Adapter> {
        let at = self.linears.binary_search_by_key(&layer.0, |l| l.layer);
        self.linears[at.ok()?].adapter
    }

    /// Returns the linear layers that can have an adapter, as their paths: ours, and that in
    /// Hugging Face's code.
    pub(crate) fn linears(&self) -> impl Iterator<Item = [&str; 2]> {
        let paths = self.linears.iter();
        paths.map(|l| [&*self.modules[l.layer.index()].path, &*l.hf])
    }

    /// Stops the training of all parameters that belong to no adapter, and to no module that is
    /// trained in full.
    pub(crate) fn freeze_base(&mut self, lora: &Lora) {
        let params = self.params.iter();
        let saved = params.map(|p| self.paths(p).any(|paths| lora.saves(paths)));
        let trained: Vec<bool> = saved
            .zip(&self.params)
            .map(|(saved, p)| saved || p.is_adapter())
            .collect();
        for (p, trained) in self.params.iter_mut().zip(trained) {
            p.requires_grad &= trained;
        }
    }

    /// Returns the paths of the modules that have a parameter: ours, and that in Hugging Face's
    /// code.
    pub(crate) fn paths<'t>(&'t self, p: &'t Param) -> impl Iterator<Item = [&'t str; 2]> {
        let hf = p.hf.as_ref().map_or("", |hf| hf.module.as_str());
        p.modules.iter().enumerate().map(move |(i, m)| {
            let module = &self.modules[m.index()];
            let hf = match module.kind {
                ModuleKind::Head if i > 0 => "lm_head",
                _ => hf,
            };
            [&module.path, hf]
        })
    }

    /// Keeps the weights of linear layers that are not trained in a packed format, in parameters of
    /// this type. The output projection, tables and stacks of experts stay as they are, as in
    /// bitsandbytes and torchtune.
    pub(crate) fn quantize(&mut self, dtype: DType, scales: PackedScales, format: PackedFormat) {
        for linear in &self.linears {
            let Some(weight) = self.own[linear.layer.index()][0] else {
                continue;
            };
            let p = &mut self.params[weight.index()];
            if p.requires_grad || p.packed.is_some() {
                continue;
            }
            let packed = Packed {
                shape: p.shape.clone(),
                format,
                scales,
            };
            p.shape = smallvec![packed.stored_numel(dtype)];
            p.packed = Some(packed);
        }
    }

    /// Returns the module that computes the loss: the last one.
    pub(crate) fn loss(&self) -> ModuleId {
        ModuleId(self.modules.len() as u32 - 1)
    }

    /// Stops the training of parameters of modules that the globs match.
    pub(crate) fn freeze(&mut self, globs: &[String]) {
        if globs.is_empty() {
            return;
        }
        let frozen: Vec<bool> = self
            .modules
            .iter()
            .map(|m| globs.iter().any(|g| covers(g, &m.path)))
            .collect();
        for p in &mut self.params {
            p.requires_grad &= !p.modules.iter().any(|m| frozen[m.index()]);
        }
    }

    /// Sets the optimizer's parameter groups.
    pub(crate) fn group(&mut self, train: &Train) {
        if train.group_settings().len() == 1 {
            return;
        }
        for p in &mut self.params {
            let hf = p.hf_name();
            let names = std::iter::once(p.name.as_str()).chain(hf.as_deref());
            p.group = train.group_of(names, p.shape.len());
        }
    }
}
