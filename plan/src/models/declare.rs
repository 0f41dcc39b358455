//! Declares a model: its modules, and their parameters with names, shapes and initialization.

use crate::config::pattern::covers;
use crate::config::{Lora, Model, Train};
use crate::ir::{
    AxisId, DType, DeviceMesh, HfForm, HfName, Init, MAGNITUDE, Module, ModuleId, ModuleKind,
    ORIGINAL, Packed, PackedFormat, PackedScales, Param, ParamId, Placement, Placements, Shape,
};
use crate::recipes::BlockPlace;
use smallvec::{SmallVec, smallvec};

/// The root of every module tree.
pub(crate) const ROOT: ModuleId = ModuleId(0);

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
    own: Vec<[Option<ParamId>; 2]>,
    /// First module and first parameter of each block, and of what follows the last one.
    starts: Vec<(ModuleId, ParamId)>,
    /// Linear layers that can have an adapter.
    linears: Vec<Linear>,
    /// Rows per sample that each module works on, if they are not the tokens.
    rows: Vec<Option<u64>>,
    /// Whether a module is part of a block that the forward skips, by module; empty if it skips
    /// none.
    pub(crate) skipped: Vec<bool>,
    /// Whether the code of all blocks is the same, and nothing else uses what they compute than the
    /// next one.
    pub(crate) same_code: bool,
}

/// A linear layer that can have an adapter.
#[derive(Clone, Debug)]
struct Linear {
    layer: ModuleId,
    /// Path in Hugging Face's code.
    hf: String,
    adapter: Option<Adapter>,
}

/// The layers of an adapter: `A` of shape `[r, in]`, `B` of shape `[out, r]`, and with DoRA the
/// lengths of rows, `[out]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Adapter {
    pub(crate) a: Layer,
    pub(crate) b: Layer,
    pub(crate) magnitude: Option<Layer>,
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
        let same = |n| kinds(n).eq(kinds(0)) && shapes(n).eq(shapes(0));
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
}

impl Tree {
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

/// A module with a weight and maybe a bias: a linear layer, a norm, a table, a convolution.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layer(ModuleId);

impl Layer {
    /// Returns its module.
    pub(crate) const fn module(self) -> ModuleId {
        self.0
    }
}

/// Name of a module: ours, and that of Hugging Face's code, both relative to the enclosing block
/// (or the model). Families without a Hugging Face form leave the second one empty.
pub(crate) type Names<'n> = (&'n str, &'n str);

/// Initialization of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weights {
    /// Normally distributed; biases are zero.
    Normal,
    /// As `nn.Linear` starts them: uniform, bounded by the fan-in, biases too.
    Uniform,
}

/// When the parameters of a norm are registered, within its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Order {
    /// Before all others.
    First,
    /// In the order of declaration.
    Declared,
    /// After all others.
    Last,
}

/// Parameters that wait for the end of their block.
struct Pending {
    order: Order,
    module: ModuleId,
    shape: Shape,
    bias: bool,
    hf: Option<HfName>,
    /// Initialization of the weight, if it is not that of the model; biases start at zero.
    norm: Option<Init>,
    /// Axis that divides a dimension of the weight.
    divided: Option<(AxisId, u8)>,
}

/// A parameter to register.
#[derive(Clone)]
struct NewParam {
    /// 0 for the weight, 1 for the bias.
    which: usize,
    shape: Shape,
    placements: Placements,
    init: Init,
    hf: Option<HfName>,
}

/// A model under declaration.
pub(crate) struct Declare {
    tree: Tree,
    weights: Weights,
    lora: Option<Lora>,
    /// Ranks that may divide parameters among themselves.
    pub(super) mesh: DeviceMesh,
    pending: Vec<Pending>,
    in_block: bool,
    /// First modules of the block under declaration and of the one whose weights it has, if it has
    /// none of its own.
    shares: Option<[ModuleId; 2]>,
    /// First module after those that share weights; `None`: all of the block do.
    shares_until: Option<ModuleId>,
    /// Prefix of the Hugging Face names of a block's modules.
    hf_prefix: String,
    /// Modules whose parameters are not trained.
    untrained: Vec<ModuleId>,
    /// Modules that adapters train in full keep their original parameters, which nothing reads.
    keeps_originals: bool,
    /// Modules whose weight is a router's bias that steps move.
    balanced: Vec<ModuleId>,
    /// Rows per sample that modules declared from here on work on, if they are not the tokens.
    rows: Option<u64>,
}

impl Declare {
    pub(crate) fn new(weights: Weights, lora: Option<Lora>, mesh: DeviceMesh) -> Self {
        let root = Module {
            path: String::new(),
            parent: None,
            kind: ModuleKind::Root,
        };
        Self {
            tree: Tree {
                modules: vec![root],
                params: Vec::new(),
                own: vec![[None, None]],
                starts: Vec::new(),
                linears: Vec::new(),
                rows: vec![None],
                skipped: Vec::new(),
                same_code: true,
            },
            weights,
            lora,
            mesh,
            pending: Vec::new(),
            in_block: false,
            shares: None,
            shares_until: None,
            hf_prefix: String::new(),
            untrained: Vec::new(),
            keeps_originals: false,
            balanced: Vec::new(),
            rows: None,
        }
    }

    /// Keeps the original parameters of modules that adapters train in full, as PEFT's
    /// `ModulesToSaveWrapper` does: they are sharded and gathered, and never read.
    pub(crate) fn keep_originals(&mut self) {
        self.keeps_originals = true;
    }

    /// Ends the declaration with the module of the loss.
    pub(crate) fn finish(mut self) -> Tree {
        self.module(ROOT, "loss", ModuleKind::Loss);
        self.tree
    }

    /// Declares a module without parameters of its own.
    pub(crate) fn module(&mut self, parent: ModuleId, name: &str, kind: ModuleKind) -> ModuleId {
        let modules = &mut self.tree.modules;
        let id = ModuleId(modules.len() as u32);
        let above = &modules[parent.index()].path;
        let path = match above.as_str() {
            "" => name.to_owned(),
            above => [above, ".", name].concat(),
        };
        modules.push(Module {
            path,
            parent: Some(parent),
            kind,
        });
        self.tree.own.push([None, None]);
        self.tree.rows.push(self.rows);
        id
    }

    /// Declares the repeated blocks `layers.0`, `layers.1`, ...: `block` declares the contents of
    /// each. `hf` is the name of Hugging Face's list of blocks.
    pub(crate) fn blocks<B>(
        &mut self,
        m: &Model,
        hf: &str,
        block: impl Fn(&mut Self, ModuleId, &Model) -> B,
    ) -> Vec<B> {
        let start = |d: &mut Self| {
            let params = ParamId(d.tree.params.len() as u32);
            let modules = ModuleId(d.tree.modules.len() as u32);
            d.tree.starts.push((modules, params));
        };
        let blocks = (0..m.layers)
            .map(|layer| {
                start(self);
                self.in_block = true;
                self.hf_prefix = format!("{hf}.{layer}.");
                if let Some(first) = m.weights_of(layer) {
                    let start = |of: u32| self.tree.starts[of as usize].0;
                    self.shares = Some([start(layer), start(first)]);
                    self.tree.same_code = false;
                }
                let module = self.module(ROOT, &format!("layers.{layer}"), ModuleKind::Block);
                let block = block(self, module, m);
                self.register();
                self.in_block = false;
                self.shares = None;
                self.shares_until = None;
                self.hf_prefix.clear();
                block
            })
            .collect();
        start(self);
        blocks
    }

    /// Declares the first modules of a block, which have the weights of the same ones of the block
    /// of layer `with`, if there is one.
    pub(crate) fn sharing<T>(
        &mut self,
        with: Option<usize>,
        part: impl FnOnce(&mut Self) -> T,
    ) -> T {
        self.blocks_differ();
        let start = |layer: usize| self.tree.starts[layer].0;
        self.shares = with.map(|first| [start(self.layer()), start(first)]);
        let declared = part(self);
        self.shares_until = Some(ModuleId(self.tree.modules.len() as u32));
        declared
    }

    /// Declares `nn.Linear`: a weight of shape `[out, in]`.
    pub(crate) fn linear(
        &mut self,
        parent: ModuleId,
        (name, hf): Names<'_>,
        shape: [u64; 2],
        bias: bool,
    ) -> Layer {
        let module = self.module(parent, name, ModuleKind::Layer);
        let layer = self.parameters(module, hf, &shape, bias);
        self.adapt(layer, hf, shape);
        layer
    }

    /// Declares a linear layer that Hugging Face's GPT-2 stores transposed (`Conv1D`).
    pub(crate) fn conv1d(
        &mut self,
        parent: ModuleId,
        (name, hf): Names<'_>,
        shape: [u64; 2],
        bias: bool,
    ) -> Layer {
        let module = self.module(parent, name, ModuleKind::Layer);
        let name = self.hf_name_as(hf, HfForm::Transposed);
        let layer = self.add(Order::Declared, module, name, &shape, bias, None);
        self.adapt(layer, hf, shape);
        layer
    }

    /// Declares the adapter of a linear layer if the layer is one of its targets. Families without
    /// a Hugging Face form have no adapters: their files could not name them.
    fn adapt(&mut self, layer: Layer, hf: &str, [out, input]: [u64; 2]) {
        let Some(HfName { module: hf, .. }) = self.hf_name(hf) else {
            return;
        };
        let path = &self.tree.modules[layer.0.index()].path;
        let wanted = |l: &&Lora| l.targets.has([path, &hf]);
        let of = self.lora.as_ref().filter(wanted).map(|l| (l.r, l.use_dora));
        let adapter = of.map(|(r, decomposed)| {
            let mut part = |name: &str, shape: &[u64], init| {
                let module = self.module(layer.0, name, ModuleKind::Layer);
                let hf = HfName {
                    module: format!("{hf}.{name}"),
                    form: HfForm::Layer,
                };
                self.add(Order::Declared, module, Some(hf), shape, false, Some(init))
            };
            // Kaiming uniform with a = sqrt(5), as `nn.Linear` starts, and zeros.
            let uniform = Init::Uniform { fan_in: input };
            Adapter {
                a: part("lora_A", &[r, input], uniform),
                b: part("lora_B", &[out, r], Init::Zeros),
                // Runs write the lengths of the base's rows.
                magnitude: decomposed.then(|| part(MAGNITUDE, &[out], Init::Ones)),
            }
        });
        self.tree.linears.push(Linear {
            layer: layer.0,
            hf,
            adapter,
        });
    }

    /// Declares `nn.Embedding`: a table of shape `[rows, width]`.
    pub(crate) fn table(
        &mut self,
        parent: ModuleId,
        (name, hf): Names<'_>,
        kind: ModuleKind,
        shape: [u64; 2],
    ) -> Layer {
        let module = self.module(parent, name, kind);
        self.parameters(module, hf, &shape, false)
    }

    /// Declares a norm over the last dimension.
    pub(crate) fn norm(
        &mut self,
        parent: ModuleId,
        names: Names<'_>,
        width: u64,
        bias: bool,
        order: Order,
    ) -> Layer {
        self.norm_from(parent, names, width, bias, order, Init::Ones)
    }

    /// Declares a norm over the last dimension whose weight starts at these values.
    pub(crate) fn norm_from(
        &mut self,
        parent: ModuleId,
        (name, hf): Names<'_>,
        width: u64,
        bias: bool,
        order: Order,
        init: Init,
    ) -> Layer {
        let module = self.module(parent, name, ModuleKind::Norm);
        let hf = self.hf_name(hf);
        self.add(order, module, hf, &[width], bias, Some(init))
    }

    /// Declares a weight of shape `[heads, width]` for norms of single heads. Hugging Face's code
    /// has one for all, or a list of them if its name ends with `.*`.
    pub(crate) fn head_norms(
        &mut self,
        parent: ModuleId,
        (name, hf): Names<'_>,
        shape: [u64; 2],
    ) -> Layer {
        let module = self.module(parent, name, ModuleKind::Norm);
        let hf = match hf.strip_suffix(".*") {
            None => self.hf_name(hf),
            Some(list) => self.hf_name_as(list, HfForm::Entries(&[""])),
        };
        self.add(Order::Declared, module, hf, &shape, false, Some(Init::Ones))
    }

    /// Declares the output projection `output`, of shape `[out, in]`.
    pub(crate) fn head(&mut self, (name, hf): Names<'_>, shape: [u64; 2], bias: bool) -> Layer {
        let module = self.module(ROOT, name, ModuleKind::Head);
        self.parameters(module, hf, &shape, bias)
    }

    /// Declares the output projection of a language model, or that `table` is its weight.
    pub(crate) fn lm_head(&mut self, table: Layer, hf: &str, m: &Model) -> Layer {
        if !m.tie_embeddings {
            let bias = m.options.head_bias;
            let width = m.options.embedding_width.unwrap_or(m.hidden);
            return self.head(("output", hf), [m.vocab, width], bias);
        }
        let head = self.module(ROOT, "output", ModuleKind::Head);
        let weight = self.tree.weight(table);
        self.tree.params[weight.index()].modules.push(head);
        self.tree.own[head.index()][0] = Some(weight);
        if m.options.head_bias {
            let bias = NewParam {
                which: 1,
                shape: smallvec![m.vocab],
                placements: Placements::REPLICATED,
                init: Init::Zeros,
                hf: self.hf_name(hf),
            };
            self.param(head, bias);
        }
        Layer(head)
    }

    /// Gives a declared module a weight and maybe a bias of the size of the weight's first
    /// dimension.
    pub(crate) fn parameters(
        &mut self,
        module: ModuleId,
        hf: &str,
        shape: &[u64],
        bias: bool,
    ) -> Layer {
        let hf = self.hf_name(hf);
        self.add(Order::Declared, module, hf, shape, bias, None)
    }

    /// Gives a declared module a parameter that Hugging Face's code has as an `nn.Parameter` of
    /// this name, whose columns may be interleaved ([`HfForm::Parameter`]).
    pub(crate) fn parameter(
        &mut self,
        module: ModuleId,
        (hf, interleaved): (&str, bool),
        shape: &[u64],
        init: Init,
    ) -> Layer {
        let hf = self.hf_name_as(hf, HfForm::Parameter { interleaved });
        self.add(Order::Declared, module, hf, shape, false, Some(init))
    }

    /// Gives a declared module such a parameter with a row for each expert, which expert-parallel
    /// ranks divide among themselves.
    pub(crate) fn expert_parameter(
        &mut self,
        module: ModuleId,
        (hf, interleaved): (&str, bool),
        shape: &[u64],
        init: Init,
    ) -> Layer {
        let form = HfForm::Parameter { interleaved };
        self.divided_experts(module, (hf, form), shape, Some(init))
    }

    /// Gives a declared module the bias of a router, zeros at first. Hugging Face's code has it as
    /// the tensor of this name in the module `hf`; it has none if `hf` is empty. `balances` says
    /// that steps move it by the load of experts; no gradient trains it.
    pub(crate) fn router_bias(
        &mut self,
        module: ModuleId,
        (hf, tensor): (&str, &'static str),
        experts: u64,
        balances: bool,
    ) -> Layer {
        let hf = self.hf_name_as(hf, HfForm::Tensor(tensor));
        let zeros = Some(Init::Zeros);
        let layer = self.add(Order::Declared, module, hf, &[experts], false, zeros);
        if balances {
            self.balanced(layer);
        } else {
            self.untrained(layer);
        }
        layer
    }

    /// Lets steps move a router's bias.
    fn balanced(&mut self, layer: Layer) {
        self.balanced.push(layer.0);
        for p in self.tree.own[layer.0.index()].into_iter().flatten() {
            self.tree.params[p.index()].router_bias = true;
        }
    }

    /// Gives a declared module a stack of experts, of shape `[experts, rows, columns]`, which
    /// expert-parallel ranks divide among themselves. Files have it in this form.
    pub(crate) fn experts(
        &mut self,
        module: ModuleId,
        (hf, form): (&str, HfForm),
        shape: &[u64],
    ) -> Layer {
        self.divided_experts(module, (hf, form), shape, None)
    }

    fn divided_experts(
        &mut self,
        module: ModuleId,
        (hf, form): (&str, HfForm),
        shape: &[u64],
        init: Option<Init>,
    ) -> Layer {
        let hf = self.hf_name_as(hf, form);
        let divided = self.mesh.size(AxisId::EP) > 1;
        self.wait(Pending {
            order: Order::Declared,
            module,
            shape: Shape::from_slice(shape),
            bias: false,
            hf,
            norm: init,
            divided: divided.then_some((AxisId::EP, 0)),
        })
    }

    /// States how many rows per sample the modules declared from here on work on; `None`: as many
    /// as a sample has tokens. Returns what was stated before.
    pub(crate) fn rows(&mut self, rows: Option<u64>) -> Option<u64> {
        std::mem::replace(&mut self.rows, rows)
    }

    /// Excludes a layer from training: no loss depends on it.
    pub(crate) fn untrained(&mut self, layer: Layer) {
        self.untrained.push(layer.0);
        for p in self.tree.own[layer.0.index()].into_iter().flatten() {
            self.tree.params[p.index()].requires_grad = false;
        }
    }

    /// States that blocks with equal modules differ in what they compute, or in what uses it.
    pub(crate) fn blocks_differ(&mut self) {
        self.tree.same_code = false;
    }

    /// Returns the number of the block under declaration.
    pub(crate) fn layer(&self) -> usize {
        self.tree.starts.len().saturating_sub(1)
    }

    /// Gives a declared module a weight of shape `[out, in]` that is divided along an axis. The
    /// ranks have slices of dimension `dim`: of the outputs (0), with the bias, or of the inputs
    /// (1), with the whole bias on every rank.
    pub(crate) fn divided(
        &mut self,
        module: ModuleId,
        shape: [u64; 2],
        bias: bool,
        axis: AxisId,
        dim: u8,
    ) -> Layer {
        let pending = Pending {
            order: Order::Declared,
            module,
            shape: Shape::from_slice(&shape),
            bias,
            hf: None,
            norm: None,
            divided: Some((axis, dim)),
        };
        self.wait(pending)
    }

    fn hf_name(&self, hf: &str) -> Option<HfName> {
        self.hf_name_as(hf, HfForm::Layer)
    }

    fn hf_name_as(&self, hf: &str, form: HfForm) -> Option<HfName> {
        (!hf.is_empty()).then(|| HfName {
            module: [&self.hf_prefix, hf].concat(),
            form,
        })
    }

    fn add(
        &mut self,
        order: Order,
        module: ModuleId,
        hf: Option<HfName>,
        shape: &[u64],
        bias: bool,
        norm: Option<Init>,
    ) -> Layer {
        self.wait(Pending {
            order,
            module,
            shape: Shape::from_slice(shape),
            bias,
            hf,
            norm,
            divided: None,
        })
    }

    /// Registers parameters at the end of their block, or at once outside of blocks.
    fn wait(&mut self, pending: Pending) -> Layer {
        let layer = Layer(pending.module);
        self.pending.push(pending);
        if !self.in_block {
            self.register();
        }
        layer
    }

    /// Registers the pending parameters.
    fn register(&mut self) {
        let mut pending = std::mem::take(&mut self.pending);
        pending.sort_by_key(|p| p.order);
        for p in pending {
            let inside = self.shares_until.is_none_or(|end| p.module < end);
            if let Some([own, first]) = self.shares.filter(|_| inside) {
                self.share(p.module, ModuleId(first.0 + p.module.0 - own.0));
                continue;
            }
            let fan_in = p.shape.iter().skip(1).product::<u64>().max(1);
            let (weight, bias) = match (p.norm, self.weights) {
                (Some(init), _) => (init, Init::Zeros),
                (None, Weights::Normal) => (Init::Normal, Init::Zeros),
                (None, Weights::Uniform) => (Init::Uniform { fan_in }, Init::Uniform { fan_in }),
            };
            let mut shape = p.shape;
            let mut placements = [Placements::REPLICATED; 2];
            if let Some((axis, dim)) = p.divided {
                shape[usize::from(dim)] /= u64::from(self.mesh.size(axis));
                placements[0] = Placements::REPLICATED.with(axis, Placement::Shard(dim));
                if dim == 0 {
                    placements[1] = placements[0];
                }
            }
            let out: SmallVec<[u64; 4]> = smallvec![shape[0]];
            let new = |which: usize, shape, init, hf| NewParam {
                which,
                shape,
                placements: placements[which],
                init,
                hf,
            };
            let form = HfForm::Layer;
            let of_bias = p.hf.clone().map(|hf| HfName { form, ..hf });
            let of_bias = p.bias.then(|| new(1, out, bias, of_bias));
            let params = [Some(new(0, shape, weight, p.hf)), of_bias];
            self.original(p.module, &params);
            for param in params.into_iter().flatten() {
                self.param(p.module, param);
            }
        }
    }

    /// Declares copies of the parameters of a module that adapters train in full, if they are kept.
    fn original(&mut self, module: ModuleId, params: &[Option<NewParam>]) {
        let path = &self.tree.modules[module.index()].path;
        let hf = params[0].as_ref().and_then(|p| p.hf.as_ref());
        let paths = [path.as_str(), hf.map_or("", |hf| hf.module.as_str())];
        let saved = self.lora.as_ref().is_some_and(|lora| lora.saves(paths));
        if !self.keeps_originals || !saved {
            return;
        }
        let copy = self.module(module, ORIGINAL, ModuleKind::Layer);
        self.untrained.push(copy);
        for param in params.iter().flatten() {
            self.param(copy, param.clone());
        }
    }

    /// Gives a module the parameters of another one.
    fn share(&mut self, module: ModuleId, with: ModuleId) {
        let own = self.tree.own[with.index()];
        for p in own.into_iter().flatten() {
            self.tree.params[p.index()].modules.push(module);
        }
        self.tree.own[module.index()] = own;
    }

    fn param(&mut self, module: ModuleId, new: NewParam) {
        let id = ParamId(self.tree.params.len() as u32);
        let path = &self.tree.modules[module.index()].path;
        let leaf = ["weight", "bias"][new.which];
        self.tree.params.push(Param {
            name: [path, ".", leaf].concat(),
            modules: smallvec![module],
            shape: new.shape,
            placements: new.placements,
            requires_grad: !self.untrained.contains(&module),
            router_bias: self.balanced.contains(&module),
            group: 0,
            packed: None,
            init: new.init,
            hf: new.hf,
        });
        self.tree.own[module.index()][new.which] = Some(id);
    }
}
