//! Declares a model: its modules, and their parameters with names, shapes and initialization.

mod tree;

use crate::config::{LayerAdapter, Lora, Model};
use crate::ir::{
    AxisId, DeviceMesh, HfForm, HfName, Init, MAGNITUDE, Module, ModuleId, ModuleKind, ORIGINAL,
    Param, ParamId, Placement, Placements, Shape,
};
use smallvec::{SmallVec, smallvec};
use tree::Linear;
pub(crate) use tree::{Adapter, Blocks, Tree};

/// The root of every module tree.
pub(crate) const ROOT: ModuleId = ModuleId(0);

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
                lookups: vec![false],
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
        self.tree.lookups.push(false);
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

    /// Declares the first modules of a block. They share the weights of the same modules of block
    /// `with`, if it is given.
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
        let lora = self.lora.as_ref();
        let of = lora.and_then(|l| Some((l.adapter([path, &hf])?, l.use_dora)));
        let adapter = of.map(|(LayerAdapter { r, scaling, .. }, decomposed)| {
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
                scaling,
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
        let table = self.parameters(module, hf, &shape, false);
        self.lookup(table);
        table
    }

    /// Excludes a layer's weight from the matmuls that model FLOPs count: it is looked up or added,
    /// or its arithmetic is counted with that of attention.
    pub(crate) fn lookup(&mut self, layer: Layer) {
        self.tree.lookups[layer.0.index()] = true;
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
            let bias = m.options.output.head_bias;
            let width = m.options.embedding.embedding_width.unwrap_or(m.hidden);
            return self.head(("output", hf), [m.vocab, width], bias);
        }
        let head = self.module(ROOT, "output", ModuleKind::Head);
        let weight = self.tree.weight(table);
        self.tree.params[weight.index()].modules.push(head);
        self.tree.own[head.index()][0] = Some(weight);
        if m.options.output.head_bias {
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
