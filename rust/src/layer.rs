//! All heads of one layer of one sequence: the flows, spelled out.

use crate::config::Options;
use crate::error::{Error, LARGEST_ELEMENT, Result};
use crate::head::{Choice, Head, Scratch, Step};
use crate::ids::{KeyId, Place};
use crate::pack::Device;
use crate::rows::{Dtype, Elements, ElementsMut, Strided, to_f32};
use crate::threads::Workers;
use std::cell::RefCell;
use std::sync::atomic::AtomicBool;

pub mod stage;

/// Positions of one work item of exact attention.
const EXACT_POSITIONS: usize = 4;

/// Seconds of work, by the last step, that are worth a thread: it has to wake up, and on the cores of a
/// model's own threads it waits for these to stop spinning.
const LEAST_SHARE: f32 = 0.4e-3;

/// Seconds that one token takes to get into the tree of one head.
const INSERTION: f32 = 12e-6;

/// Elements of a scaled query that are so large make a softmax of one key, or of equal ones.
const LARGEST_QUERY: f32 = 1e30;

/// Shape of a layer. Query head `h` reads KV head `h / group`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub q_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

/// One array [heads, tokens, head_dim], as its heads.
pub type Heads<'a> = Vec<Strided<'a>>;

/// What a layer is to attend to sparsely: positions [q_heads, n, head_dim], and where to write.
#[derive(Debug)]
pub struct Queries<'a> {
    pub q: &'a Heads<'a>,
    /// What another layer selected at the same positions, to take instead of searching.
    pub like: Option<&'a Choices>,
    pub out: ElementsMut<'a>,
}

impl Queries<'_> {
    /// Positions.
    fn len(&self) -> usize {
        self.q.first().map_or(0, |head| head.len)
    }
}

#[derive(Debug)]
pub struct Layer {
    shape: Shape,
    scale: f32,
    stream: u64,
    options: Options,
    dtype: Option<Dtype>,
    heads: Vec<Head>,
    steps: usize,
    device: Option<Device>,
}

/// What a call of [`Layer::decode`] or [`Layer::stage`] attended to exactly, for layers to do like it.
#[derive(Debug, Clone, PartialEq)]
pub struct Choices {
    /// Tokens stored after the call.
    seq_len: usize,
    /// Of each KV head and position.
    heads: Vec<Vec<Choice>>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Layer {
    /// `scale` multiplies the queries. `layer_index` and the number of the head in the model, which
    /// is `first_kv_head` for head 0, make the trees of heads differ.
    pub fn new(
        shape: Shape,
        scale: f32,
        layer_index: usize,
        first_kv_head: usize,
        options: Options,
    ) -> Result<Self> {
        options.validate()?;
        let dims = [
            ("num_q_heads", shape.q_heads),
            ("num_kv_heads", shape.kv_heads),
            ("head_dim", shape.head_dim),
        ];
        for (option, got) in dims {
            if got == 0 {
                return Err(config(option, "at least 1".into(), got));
            }
        }
        if !shape.q_heads.is_multiple_of(shape.kv_heads) {
            let expected = format!("a multiple of num_kv_heads = {}", shape.kv_heads);
            return Err(config("num_q_heads", expected, shape.q_heads));
        }
        if !scale.is_finite() {
            return Err(config("scale", "finite".into(), scale));
        }
        Ok(Self {
            shape,
            scale,
            stream: (layer_index as u64) << 32 | first_kv_head as u64,
            options,
            dtype: None,
            heads: Vec::new(),
            steps: 0,
            device: None,
        })
    }

    pub fn shape(&self) -> Shape {
        self.shape
    }

    pub fn dtype(&self) -> Option<Dtype> {
        self.dtype
    }

    pub fn seq_len(&self) -> usize {
        self.heads.first().map_or(0, Head::len)
    }

    pub fn heads(&self) -> &[Head] {
        &self.heads
    }

    pub fn steps(&self) -> usize {
        self.steps
    }

    // ---- the two flows ------------------------------------------------------------------------
    //
    // Once `cancelled` is set a call soon fails with `Error::Interrupted`; what it had appended by
    // then is gone again.

    /// Prefill. Appends `k` and `v`; with `q` and `out` also attends exactly to everything stored,
    /// each position to itself and what is before it; then indexes all but sink and window.
    pub fn prefill(
        &mut self,
        k: &Heads<'_>,
        v: &Heads<'_>,
        q: Option<(&Heads<'_>, ElementsMut<'_>)>,
        cancelled: &AtomicBool,
    ) -> Result<()> {
        let n = self.check_new(k, v)?;
        if let Some((q, out)) = &q {
            self.check_queries(q, n)?;
            self.check_output(n, out)?;
        }
        self.grow(k[0].dtype(), |layer| {
            let workers = layer.workers(cancelled);
            let Some((q, out)) = q else {
                return layer.each_head(workers, |h, head, options, workers| {
                    head.append_bulk(k[h], v[h], options, workers)
                });
            };
            layer.each_head(workers, |h, head, options, _| {
                (0..n).for_each(|i| head.store(k[h], v[h], i, options));
                Ok(())
            })?;
            layer.exact(q, out, workers)?;
            layer.each_head(workers, |_, head, options, workers| {
                head.settle(options, workers)
            })
        })
    }

    /// The checks of a prefill with queries, for a caller that attends by itself.
    pub fn validate(&self, q: &Heads<'_>, k: &Heads<'_>, v: &Heads<'_>) -> Result<()> {
        let n = self.check_new(k, v)?;
        self.check_queries(q, n)
    }

    /// Decode. Appends one position or more and attends sparsely, each position for itself and to
    /// nothing after it. `out` is [q_heads, positions, head_dim], of any dtype. With `like` it does not
    /// search but selects what another layer did at the same positions.
    pub fn decode(
        &mut self,
        q: &Heads<'_>,
        k: &Heads<'_>,
        v: &Heads<'_>,
        like: Option<&Choices>,
        out: ElementsMut<'_>,
        cancelled: &AtomicBool,
    ) -> Result<()> {
        let queries = Queries { q, like, out };
        Self::decode_batch(&mut [self], vec![(queries, k, v)], cancelled)
    }

    /// [`Layer::decode`] of several sequences, whose heads share the threads: queries, keys and values
    /// for each layer. If one of them fails, nothing is appended to any.
    pub fn decode_batch(
        layers: &mut [&mut Self],
        rows: Vec<(Queries<'_>, &Heads<'_>, &Heads<'_>)>,
        cancelled: &AtomicBool,
    ) -> Result<()> {
        for (row, (layer, (queries, k, v))) in layers.iter().zip(&rows).enumerate() {
            let checked = layer.check_new(k, v).and_then(|n| {
                layer.check_queries(queries.q, n)?;
                layer.check_output(n, &queries.out)?;
                layer.check_choices(n, queries.like)
            });
            checked.map_err(|error| match rows.len() {
                1 => error,
                _ => {
                    let error = Box::new(error);
                    Error::InRow { row, error }
                }
            })?;
        }
        let before: Vec<usize> = layers.iter().map(|layer| layer.seq_len()).collect();
        let (queries, new): (Vec<_>, Vec<_>) =
            rows.into_iter().map(|(q, k, v)| (q, (k, v))).unzip();
        for (layer, (k, _)) in layers.iter_mut().zip(&new) {
            layer.start(k[0].dtype());
        }
        let append = |row: usize, head: &mut Head, h: usize, i: usize, options: &Options| {
            let (k, v) = new[row];
            head.append(k[h], v[h], i, options)?;
            Ok(before[row] + i + 1)
        };
        let workers = layers.first().map(|layer| layer.workers(cancelled));
        let result = workers.map_or(Ok(()), |workers| sparse(layers, queries, workers, append));
        if result.is_err() {
            for (layer, &n) in layers.iter_mut().zip(&before) {
                layer.crop(n)?;
            }
        }
        result
    }

    /// Appends as [`Layer::decode`] does, without attending.
    pub fn append(&mut self, k: &Heads<'_>, v: &Heads<'_>, cancelled: &AtomicBool) -> Result<()> {
        let n = self.check_new(k, v)?;
        self.grow(k[0].dtype(), |layer| {
            let busy = INSERTION * (n * layer.heads.len()) as f32;
            let workers = layer
                .workers(cancelled)
                .at_most((busy / LEAST_SHARE) as usize);
            layer.each_head(workers, |h, head, options, workers| {
                (0..n).try_for_each(|i| {
                    workers.check()?;
                    head.append(k[h], v[h], i, options)
                })
            })
        })
    }

    /// Attends sparsely with the queries of the last stored positions.
    pub fn attend(&mut self, q: &Heads<'_>, out: ElementsMut<'_>) -> Result<()> {
        let n = self.check_last("attend", q, &out)?;
        let most = self
            .heads
            .iter()
            .map(|head| match head.forest().is_empty() {
                true => head.len(),
                false => head.window_len(),
            });
        let most = most.min().unwrap_or(0);
        if n > most {
            return Err(Error::TooManyQueries {
                call: "attend",
                most,
                got: n,
            });
        }
        let first = self.seq_len() - n;
        let workers = Workers::steady(self.options.num_threads);
        let queries = vec![Queries { q, like: None, out }];
        sparse(&mut [self], queries, workers, |_, _, _, i, _| {
            Ok(first + i + 1)
        })
    }

    /// Attends exactly with the queries of the last stored positions.
    pub fn attend_exact(
        &mut self,
        q: &Heads<'_>,
        out: ElementsMut<'_>,
        cancelled: &AtomicBool,
    ) -> Result<()> {
        self.check_last("attend_exact", q, &out)?;
        self.exact(q, out, self.workers(cancelled))
    }

    /// Runs what appends tokens; if it fails, they are gone again.
    fn grow<T>(&mut self, dtype: Dtype, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let before = self.seq_len();
        self.start(dtype);
        let result = work(self);
        if result.is_err() {
            self.crop(before)?;
        }
        result
    }

    /// Runs `work(kv head, head, options, workers)` for every head, with the workers that are its
    /// own. What fails was cancelled.
    fn each_head<'a>(
        &mut self,
        workers: Workers<'a>,
        work: impl Fn(usize, &mut Head, &Options, Workers<'a>) -> Result<()> + Sync,
    ) -> Result<()> {
        let options = &self.options;
        workers.for_each_large(&mut self.heads, |h, head, workers| {
            // The workers know of it.
            let _ = work(h, head, options, workers);
        })
    }

    /// Exact attention of the last positions, in parallel over heads and blocks of positions.
    fn exact(&self, q: &Heads<'_>, mut out: ElementsMut<'_>, workers: Workers<'_>) -> Result<()> {
        let (group, dim, n) = (self.group(), self.shape.head_dim, q[0].len);
        let first = self.seq_len() - n;
        let blocks = n.div_ceil(EXACT_POSITIONS);
        let mut results: Vec<Vec<f32>> = vec![Vec::new(); self.heads.len() * blocks];
        workers.for_each_mut(&mut results, |item, result| {
            let (h, from) = (item / blocks, item % blocks * EXACT_POSITIONS);
            let positions = from..(from + EXACT_POSITIONS).min(n);
            let mut queries = vec![0.0; group * positions.len() * dim];
            let mut visible = Vec::with_capacity(group * positions.len());
            let mut rows = queries.chunks_exact_mut(dim);
            for g in 0..group {
                for i in positions.clone() {
                    let row = rows.next().expect("one row per query");
                    scaled(q[h * group + g].row(i), self.scale, row);
                    visible.push(first + i + 1);
                }
            }
            result.resize(queries.len(), 0.0);
            SCRATCH.with_borrow_mut(|scratch| {
                self.heads[h].attend_exact(&queries, &visible, scratch, result);
            });
        })?;
        for (item, result) in results.iter().enumerate() {
            let (h, from) = (item / blocks, item % blocks * EXACT_POSITIONS);
            let rows = result.len() / (group * dim);
            for g in 0..group {
                let to = ((h * group + g) * n + from) * dim;
                out.write(to, &result[g * rows * dim..][..rows * dim]);
            }
        }
        Ok(())
    }

    // ---- the rest -----------------------------------------------------------------------------

    /// Keeps the first `n` tokens.
    pub fn crop(&mut self, n: usize) -> Result<()> {
        let stored = self.seq_len();
        if n > stored {
            return Err(Error::Crop { stored, asked: n });
        }
        if n == 0 {
            self.reset();
            return Ok(());
        }
        let workers = Workers::steady(self.options.num_threads);
        self.each_head(workers, |_, head, options, _| {
            head.crop(n, options);
            Ok(())
        })
    }

    /// An independent layer with the same tokens. On a device it has nothing yet.
    pub fn fork(&mut self) -> Self {
        Self {
            shape: self.shape,
            scale: self.scale,
            stream: self.stream,
            options: self.options.clone(),
            dtype: self.dtype,
            heads: self.heads.iter_mut().map(Head::fork).collect(),
            steps: self.steps,
            device: self.device.as_ref().map(|_| Device::default()),
        }
    }

    /// Forgets everything, the dtype too.
    pub fn reset(&mut self) {
        self.heads.clear();
        self.dtype = None;
        self.steps = 0;
        if let Some(device) = &mut self.device {
            device.last = Default::default();
        }
    }

    /// Writes all keys and values in order of position, [kv_heads, seq_len, head_dim] each.
    pub fn gather(&self, mut keys: ElementsMut<'_>, mut values: ElementsMut<'_>) -> Result<()> {
        let (n, dim) = (self.seq_len(), self.shape.head_dim);
        for (what, out) in [("keys", &keys), ("values", &values)] {
            self.check_elements(what, self.shape.kv_heads * n * dim, out)?;
            require_dtype(what, self.dtype, out.dtype())?;
        }
        for (h, head) in self.heads.iter().enumerate() {
            head.for_each_token(|position, key, value| {
                let at = (h * n + position) * dim;
                keys.copy(at, key);
                values.copy(at, value);
            });
        }
        Ok(())
    }

    /// Positions attended exactly by the last step, of each KV head.
    pub fn selected(&self) -> Vec<Vec<KeyId>> {
        self.heads.iter().map(Head::selected).collect()
    }

    /// What the last call of [`Layer::decode`] or [`Layer::stage`] chose, unless some of it is gone.
    pub fn choices(&self) -> Choices {
        Choices {
            seq_len: self.heads.first().map_or(0, |head| head.step().visible),
            heads: (self.heads.iter().map(|head| head.choices().to_vec())).collect(),
        }
    }

    /// The last step of each KV head.
    pub fn last_steps(&self) -> impl Iterator<Item = Step> + '_ {
        self.heads.iter().map(Head::step)
    }

    /// Bytes of the keys and values alone, of everything held, and of that what forks hold too.
    pub fn bytes(&self) -> (usize, usize, usize) {
        let rows = self.heads.iter().map(Head::row_bytes).sum();
        let bytes = self.heads.iter().map(Head::bytes);
        let (all, shared) = bytes.fold((0, 0), |sum, head| (sum.0 + head.0, sum.1 + head.1));
        let device = self.device.as_ref().map_or(0, |device| {
            device.tokens.capacity() * size_of::<(usize, Place)>()
                + device.targets.capacity() * size_of::<u32>()
        });
        (rows, all + device + size_of::<Self>(), shared)
    }

    /// Every invariant of every head.
    pub fn check(&self) -> Result<()> {
        let n = self.seq_len();
        if self.heads.iter().any(|head| head.len() != n) {
            return Err(Error::Invariant("heads of different lengths".into()));
        }
        self.heads.iter().try_for_each(Head::check)
    }

    fn workers<'a>(&self, cancelled: &'a AtomicBool) -> Workers<'a> {
        Workers::new(self.options.num_threads, cancelled)
    }

    /// Seconds that so many steps take, by the last one.
    fn busy(&self, steps: usize) -> f32 {
        let busy: f32 = self.last_steps().map(|step| step.times.total()).sum();
        busy * steps as f32
    }

    fn group(&self) -> usize {
        self.shape.q_heads / self.shape.kv_heads
    }

    fn start(&mut self, dtype: Dtype) {
        if self.dtype.is_none() {
            let dim = self.shape.head_dim;
            let stream = |h: usize| self.stream + h as u64;
            let heads = (0..self.shape.kv_heads).map(|h| Head::new(dtype, dim, dim, stream(h)));
            self.heads = heads.collect();
            if self.device.is_some() {
                let slots = self.device_slots();
                self.heads
                    .iter_mut()
                    .for_each(|head| head.open_device(slots));
            }
            self.dtype = Some(dtype);
        }
    }

    /// Checks keys and values to be appended; returns how many tokens they are.
    fn check_new(&self, k: &Heads<'_>, v: &Heads<'_>) -> Result<usize> {
        let n = k.first().map_or(0, |head| head.len);
        let dtype = self.dtype.or(k.first().map(|head| head.dtype()));
        self.check_array("k", k, self.shape.kv_heads, n.max(1), dtype)?;
        self.check_array("v", v, self.shape.kv_heads, n.max(1), dtype)?;
        let most = KeyId::MAX as usize;
        if self.seq_len() + n > most {
            let got = self.seq_len() + n;
            return Err(Error::TooLong { most, got });
        }
        Ok(n)
    }

    fn check_queries(&self, q: &Heads<'_>, n: usize) -> Result<()> {
        self.check_array("q", q, self.shape.q_heads, n, None)
    }

    /// Checks that what another layer chose is for the `n` positions that are to be appended.
    fn check_choices(&self, n: usize, like: Option<&Choices>) -> Result<()> {
        let Some(like) = like else {
            return Ok(());
        };
        let refuse = |what: &'static str, expected: usize, got: usize| match expected == got {
            true => Ok(()),
            false => Err(Error::Like {
                what,
                expected,
                got,
            }),
        };
        refuse("KV heads", self.shape.kv_heads, like.heads.len())?;
        refuse("tokens", self.seq_len() + n, like.seq_len)?;
        let most = self.options.most_selected();
        for choices in &like.heads {
            refuse("positions in its last call", n, choices.len())?;
            let selected = choices.iter().flatten().map(Vec::len).max().unwrap_or(0);
            refuse("tokens selected at most", most, selected.max(most))?;
        }
        Ok(())
    }

    fn check_output(&self, n: usize, out: &ElementsMut<'_>) -> Result<()> {
        let elements = self.shape.q_heads * n * self.shape.head_dim;
        self.check_elements("out", elements, out)
    }

    fn check_elements(
        &self,
        what: &'static str,
        elements: usize,
        out: &ElementsMut<'_>,
    ) -> Result<()> {
        if out.len() == elements {
            return Ok(());
        }
        Err(Error::Shape {
            what,
            expected: format!("{elements} elements"),
            got: format!("{} elements", out.len()),
        })
    }

    /// Checks queries of the last stored positions; returns how many positions they are.
    fn check_last(
        &self,
        call: &'static str,
        q: &Heads<'_>,
        out: &ElementsMut<'_>,
    ) -> Result<usize> {
        let n = q.first().map_or(0, |head| head.len);
        self.check_queries(q, n.max(1))?;
        self.check_output(n, out)?;
        let most = self.seq_len();
        if most == 0 {
            return Err(Error::Empty { call });
        }
        if n > most {
            return Err(Error::TooManyQueries { call, most, got: n });
        }
        Ok(n)
    }

    fn check_array(
        &self,
        what: &'static str,
        heads: &Heads<'_>,
        count: usize,
        tokens: usize,
        dtype: Option<Dtype>,
    ) -> Result<()> {
        let dim = self.shape.head_dim;
        let (got_tokens, got_dim) = heads.first().map_or((0, dim), |head| (head.len, head.dim));
        if heads.len() != count || got_tokens != tokens || got_dim != dim {
            return Err(Error::Shape {
                what,
                expected: format!("[{count}, {tokens}, {dim}]"),
                got: format!("[{}, {got_tokens}, {got_dim}]", heads.len()),
            });
        }
        for (head, rows) in heads.iter().enumerate() {
            require_dtype(what, dtype, rows.dtype())?;
            // Queries shrink where they must, see `scaled`.
            let limit = if what == "q" {
                f32::MAX
            } else {
                LARGEST_ELEMENT
            };
            if let Some((token, value)) = rows.beyond(limit) {
                return Err(Error::OutOfRange {
                    what,
                    head,
                    token,
                    value,
                });
            }
        }
        Ok(())
    }
}

/// Steps of positions of several layers, whose heads share the threads: `ready(row, head, kv head, i,
/// options)` makes position `i` of a head of a layer ready and returns how many positions it sees.
fn sparse(
    layers: &mut [&mut Layer],
    queries: Vec<Queries<'_>>,
    workers: Workers<'_>,
    ready: impl Fn(usize, &mut Head, usize, usize, &Options) -> Result<usize> + Sync,
) -> Result<()> {
    let busy = (layers.iter().zip(&queries)).map(|(layer, queries)| layer.busy(queries.len()));
    let workers = worthwhile(workers, busy.sum());
    let steps: Vec<usize> = queries.iter().map(Queries::len).collect();
    let mut items = Vec::new();
    for (row, (layer, queries)) in layers.iter_mut().zip(queries).enumerate() {
        let (group, dim, n) = (layer.group(), layer.shape.head_dim, queries.len());
        let Queries { q, like, out } = queries;
        let (options, scale) = (&layer.options, layer.scale);
        let outputs = out.chunks((group * n * dim).max(1));
        for (h, (head, out)) in layer.heads.iter_mut().zip(outputs).enumerate() {
            let q = &q[h * group..][..group];
            let like = like.map(|choices| &choices.heads[h]);
            items.push((row, h, head, q, like, out, options, scale));
        }
    }
    workers.for_each_mut(
        &mut items,
        |_, (row, h, head, q, like, out, options, scale)| {
            SCRATCH.with_borrow_mut(|scratch| {
                let (n, dim) = (q[0].len, q[0].dim);
                let mut queries = vec![0.0; q.len() * dim];
                let mut result = vec![0.0; q.len() * dim];
                head.forget_choices();
                for i in 0..n {
                    let (Ok(()), Ok(visible)) =
                        (workers.check(), ready(*row, head, *h, i, options))
                    else {
                        return; // The workers know of it.
                    };
                    for (query, q) in queries.chunks_exact_mut(dim).zip(*q) {
                        scaled(q.row(i), *scale, query);
                    }
                    let like = like.map(|choices| &choices[i]);
                    head.step_sparse(&queries, visible, like, options, scratch, &mut result);
                    for (g, row) in result.chunks_exact(dim).enumerate() {
                        out.write((g * n + i) * dim, row);
                    }
                }
            });
        },
    )?;
    for (layer, n) in layers.iter_mut().zip(steps) {
        layer.steps += n;
    }
    Ok(())
}

/// As many workers as so many seconds of work are worth, by the last step; all if there was none.
fn worthwhile(workers: Workers<'_>, busy: f32) -> Workers<'_> {
    match busy > 0.0 {
        true => workers.at_most((busy / LEAST_SHARE) as usize),
        false => workers,
    }
}

/// Refuses another dtype than the expected one, if any is.
fn require_dtype(what: &'static str, expected: Option<Dtype>, got: Dtype) -> Result<()> {
    match expected {
        Some(expected) if expected != got => Err(Error::Dtype {
            what,
            expected,
            got,
        }),
        _ => Ok(()),
    }
}

/// A query as attention uses it. One beyond [`LARGEST_QUERY`] shrinks to it, so that its products
/// do not overflow.
fn scaled(row: Elements<'_>, scale: f32, out: &mut [f32]) {
    to_f32(row, out);
    let largest = out.iter().fold(0.0f32, |a, x| a.max(x.abs()));
    let scale = scale * (LARGEST_QUERY / scale.abs() / largest).min(1.0);
    out.iter_mut().for_each(|x| *x *= scale);
}

fn config(option: &'static str, expected: String, got: impl ToString) -> Error {
    Error::Config {
        option,
        expected,
        got: got.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    const DIM: usize = 8;

    fn heads(rows: &[f32], from: usize, to: usize) -> Heads<'_> {
        let row = |n: usize| n * DIM;
        rows.chunks(rows.len() / 2)
            .map(|head| Strided {
                dim: DIM,
                len: to - from,
                stride: DIM,
                elements: Elements::F32(&head[row(from)..row(to)]),
            })
            .collect()
    }

    fn contents(layer: &Layer) -> (Vec<u32>, Vec<u32>) {
        let bits = |rows: Vec<f32>| rows.iter().map(|x| x.to_bits()).collect();
        let size = 2 * layer.seq_len() * DIM;
        let (mut keys, mut values) = (vec![0.0; size], vec![0.0; size]);
        let out = (ElementsMut::F32(&mut keys), ElementsMut::F32(&mut values));
        layer.gather(out.0, out.1).unwrap();
        (bits(keys), bits(values))
    }

    /// Whenever it is cancelled: every token is in, or none of them and the others are as they were.
    #[test]
    fn a_cancelled_prefill_leaves_no_trace() {
        let mut random = Random::new(5, 0);
        let rows: Vec<f32> = (0..2 * 9000 * DIM)
            .map(|_| random.below(2001) as f32 / 1000.0 - 1.0)
            .collect();
        let never = AtomicBool::new(false);
        let shape = Shape {
            q_heads: 2,
            kv_heads: 2,
            head_dim: DIM,
        };
        let (mut done, mut cut) = (0, 0);
        // A first bulk, one into the window, one that rebuilds, one that goes in one by one.
        for (start, more) in [(0, 5000), (50, 40), (2000, 5000), (5000, 3000)] {
            for (round, append) in (0..12).flat_map(|round| [(round, false), (round, true)]) {
                let options = Options {
                    num_threads: 2,
                    ..Options::default()
                };
                let mut layer = Layer::new(shape, 1.0, 0, 0, options).unwrap();
                if start > 0 {
                    let first = heads(&rows, 0, start);
                    layer.prefill(&first, &first, None, &never).unwrap();
                }
                let before = contents(&layer);
                let new = heads(&rows, start, start + more);
                let cancelled = AtomicBool::new(false);
                let result = std::thread::scope(|scope| {
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_micros(100 << round));
                        cancelled.store(true, Ordering::Relaxed);
                    });
                    match append {
                        true => layer.append(&new, &new, &cancelled),
                        false => layer.prefill(&new, &new, None, &cancelled),
                    }
                });
                assert_eq!(layer.check(), Ok(()));
                if result.is_ok() {
                    done += 1;
                    assert_eq!(layer.seq_len(), start + more);
                } else {
                    cut += 1;
                    assert_eq!(result, Err(Error::Interrupted));
                    assert_eq!(layer.seq_len(), start);
                    assert_eq!(layer.dtype().is_some(), start > 0);
                    assert!(contents(&layer) == before);
                }
                let next = heads(&rows, 8000, 8400);
                layer.prefill(&next, &next, None, &never).unwrap();
                assert_eq!(layer.check(), Ok(()));
            }
        }
        assert!(done > 0 && cut > 10, "{done} done, {cut} cancelled");
    }

    /// Whenever it is cancelled: all is staged, or the layer is as it was and nothing is taken for
    /// being on the device.
    #[test]
    fn a_cancelled_stage_leaves_no_trace() {
        let mut random = Random::new(6, 0);
        let rows: Vec<f32> = (0..2 * 9000 * DIM)
            .map(|_| random.below(2001) as f32 / 1000.0 - 1.0)
            .collect();
        let never = AtomicBool::new(false);
        let shape = Shape {
            q_heads: 2,
            kv_heads: 2,
            head_dim: DIM,
        };
        let options = Options {
            num_threads: 2,
            device_tokens: Some(40 * 64),
            ..Options::default()
        };
        let mut layer = Layer::new(shape, 1.0, 0, 0, options).unwrap();
        layer.open_device().unwrap();
        let first = heads(&rows, 0, 6000);
        layer.prefill(&first, &first, None, &never).unwrap();
        let mut staging = vec![0u128; layer.staging_bytes().div_ceil(16)];
        // SAFETY: 16 bytes each, without padding, and every byte is a valid one.
        let (_, staging, _) = unsafe { staging.align_to_mut::<u8>() };
        let (mut done, mut cut) = (0, 0);
        for round in 0..60 {
            let at = layer.seq_len();
            let new = heads(&rows, at, at + 40);
            let before = contents(&layer);
            let cancelled = AtomicBool::new(round == 0);
            let result = std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_micros(100 << (round % 12)));
                    cancelled.store(true, Ordering::Relaxed);
                });
                layer.stage(&new, &new, &new, None, staging, &cancelled)
            });
            assert_eq!(layer.check(), Ok(()));
            let one = heads(&rows, 8900, 8901);
            if let Ok(staged) = result {
                done += 1;
                assert!(staged.hits > 0 && layer.seq_len() == at + 40);
                assert_eq!(layer.staged().unwrap().0.misses, staged.misses);
            } else {
                cut += 1;
                assert_eq!(result.unwrap_err(), Error::Interrupted);
                assert!(layer.seq_len() == at && contents(&layer) == before);
                let next = layer
                    .stage(&one, &one, &one, None, staging, &never)
                    .unwrap();
                assert!(next.hits == 0 && next.misses > 0);
                layer.crop(at).unwrap();
            }
        }
        assert!(done > 0 && cut > 1, "{done} done, {cut} cancelled");
    }
}
