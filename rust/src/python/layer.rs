//! `Layer`: what `icecache.LayerCache` is made of. Python checks kinds and dtypes of arrays.

use super::arrays::{Array, Output};
use super::errors::{all_interruptible, interruptible, locked};
use crate::config::{Options, Selection, Tail, TreeOptions};
use crate::head::Times;
use crate::layer::{Choices, Layer, Queries, Shape};
use crate::rows::{Dtype, ElementsMut, RowStore, to_f32};
use crate::tree::node::{Level, Scalars};
use numpy::{IntoPyArray, PyArray1, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::Mutex;

#[pyclass(name = "Layer", module = "icecache._icecache", frozen)]
pub struct PyLayer(Mutex<Layer>);

/// What each position of a call attended to exactly.
#[pyclass(name = "Choices", module = "icecache._icecache", frozen)]
pub struct PyChoices(Choices);

/// Positions of the longest append or decode that does not look for signals.
const FEW: usize = 32;

type Any<'a, 'py> = &'a Bound<'py, PyAny>;
type Bytes<'a, 'py> = &'a Bound<'py, PyArray1<u8>>;

#[pymethods]
impl PyLayer {
    /// `config`: an IceConfig; its fields are the options of the core.
    #[new]
    fn new(
        num_q_heads: usize,
        num_kv_heads: usize,
        head_dim: usize,
        scale: f32,
        layer_index: usize,
        first_kv_head: usize,
        config: Any<'_, '_>,
    ) -> PyResult<Self> {
        let shape = Shape {
            q_heads: num_q_heads,
            kv_heads: num_kv_heads,
            head_dim,
        };
        let layer = Layer::new(shape, scale, layer_index, first_kv_head, options(config)?)?;
        Ok(Self(Mutex::new(layer)))
    }

    #[pyo3(signature = (k, v, dtype, q=None, out=None))]
    fn prefill(
        &self,
        py: Python<'_>,
        k: Any<'_, '_>,
        v: Any<'_, '_>,
        dtype: &str,
        q: Option<Any<'_, '_>>,
        out: Option<Any<'_, '_>>,
    ) -> PyResult<()> {
        let (k, v) = (Array::new(k, dtype)?, Array::new(v, dtype)?);
        let q = q.map(|q| Array::new(q, dtype)).transpose()?;
        let (k, v) = (k.heads()?, v.heads()?);
        let q = q.as_ref().map(Array::heads).transpose()?;
        let mut out = out.map(|out| Output::new(out, dtype)).transpose()?;
        let out = out.as_mut().map(Output::elements).transpose()?;
        let attention = q.as_ref().zip(out);
        let long = k.first().is_some_and(|head| head.len > 1);
        interruptible(py, &self.0, long, |layer, cancelled| {
            layer.prefill(&k, &v, attention, cancelled)
        })
    }

    /// Raises what `prefill` with these queries would raise.
    fn validate(
        &self,
        py: Python<'_>,
        q: Any<'_, '_>,
        k: Any<'_, '_>,
        v: Any<'_, '_>,
        dtype: &str,
    ) -> PyResult<()> {
        let [q, k, v] = [
            Array::new(q, dtype)?,
            Array::new(k, dtype)?,
            Array::new(v, dtype)?,
        ];
        let (q, k, v) = (q.heads()?, k.heads()?, v.heads()?);
        locked(py, &self.0, |layer| layer.validate(&q, &k, &v))
    }

    /// `like`: what another layer selected, to take instead of searching.
    #[pyo3(signature = (q, k, v, dtype, out, like=None))]
    fn decode(
        &self,
        py: Python<'_>,
        q: Any<'_, '_>,
        k: Any<'_, '_>,
        v: Any<'_, '_>,
        dtype: &str,
        out: Any<'_, '_>,
        like: Option<&Bound<'_, PyChoices>>,
    ) -> PyResult<()> {
        let [q, k, v] = [
            Array::new(q, dtype)?,
            Array::new(k, dtype)?,
            Array::new(v, dtype)?,
        ];
        let (q, k, v) = (q.heads()?, k.heads()?, v.heads()?);
        let mut out = Output::new(out, dtype)?;
        let out = out.elements()?;
        let like = like.map(|choices| &choices.get().0);
        let long = k.first().is_some_and(|head| head.len > FEW);
        interruptible(py, &self.0, long, |layer, cancelled| {
            layer.decode(&q, &k, &v, like, out, cancelled)
        })
    }

    /// `decode` of several sequences, whose heads share the threads: lists of as many layers, queries,
    /// keys, values, and of what to select if anything; outputs in one array.
    #[staticmethod]
    #[pyo3(signature = (layers, q, k, v, dtype, out, like=None))]
    fn decode_batch(
        py: Python<'_>,
        layers: Vec<Bound<'_, Self>>,
        q: Vec<Bound<'_, PyAny>>,
        k: Vec<Bound<'_, PyAny>>,
        v: Vec<Bound<'_, PyAny>>,
        dtype: &str,
        out: Any<'_, '_>,
        like: Option<Vec<Bound<'_, PyChoices>>>,
    ) -> PyResult<()> {
        let arrays = [q, k, v].map(|list| {
            let arrays = list.iter().map(|array| Array::new(array, dtype));
            arrays.collect::<PyResult<Vec<_>>>()
        });
        let [q, k, v] = arrays;
        let (q, k, v) = (q?, k?, v?);
        let [q, k, v] = [&q, &k, &v].map(|arrays| {
            let heads = arrays.iter().map(Array::heads);
            heads.collect::<PyResult<Vec<_>>>()
        });
        let (q, k, v) = (q?, k?, v?);
        let mut out = Output::new(out, dtype)?;
        let out = out.elements()?;
        let each = out.len() / layers.len().max(1);
        let mut outputs = out.chunks(each.max(1));
        outputs.resize_with(layers.len(), || ElementsMut::F32(&mut []));
        let likes = (0..layers.len()).map(|i| Some(&like.as_ref()?[i].get().0));
        let rows = outputs.into_iter().zip(likes).zip(q.iter().zip(&k).zip(&v));
        let rows = rows.map(|((out, like), ((q, k), v))| (Queries { q, like, out }, k, v));
        let rows: Vec<_> = rows.collect();
        let cells: Vec<_> = layers.iter().map(|layer| &layer.get().0).collect();
        let long = k.iter().flatten().any(|head| head.len > FEW);
        all_interruptible(py, &cells, long, |layers, cancelled| {
            Layer::decode_batch(layers, rows, cancelled)
        })
    }

    fn append(&self, py: Python<'_>, k: Any<'_, '_>, v: Any<'_, '_>, dtype: &str) -> PyResult<()> {
        let (k, v) = (Array::new(k, dtype)?, Array::new(v, dtype)?);
        let (k, v) = (k.heads()?, v.heads()?);
        let long = k.first().is_some_and(|head| head.len > FEW);
        interruptible(py, &self.0, long, |layer, cancelled| {
            layer.append(&k, &v, cancelled)
        })
    }

    /// Queries of the last stored positions, sparsely or over everything.
    fn attend(
        &self,
        py: Python<'_>,
        q: Any<'_, '_>,
        dtype: &str,
        out: Any<'_, '_>,
        exact: bool,
    ) -> PyResult<()> {
        let q = Array::new(q, dtype)?;
        let q = q.heads()?;
        let mut out = Output::new(out, dtype)?;
        let out = out.elements()?;
        let long = exact && q.first().is_some_and(|head| head.len > 1);
        interruptible(py, &self.0, long, |layer, cancelled| {
            if exact {
                layer.attend_exact(&q, out, cancelled)
            } else {
                layer.attend(&q, out)
            }
        })
    }

    fn open_device(&self, py: Python<'_>) -> PyResult<()> {
        locked(py, &self.0, |layer| layer.open_device())
    }

    #[getter]
    fn device_slots(&self, py: Python<'_>) -> PyResult<usize> {
        locked(py, &self.0, |layer| Ok(layer.device_slots()))
    }

    #[getter]
    fn positions_at_once(&self, py: Python<'_>) -> PyResult<usize> {
        locked(py, &self.0, |layer| Ok(layer.positions_at_once()))
    }

    #[getter]
    fn staging_bytes(&self, py: Python<'_>) -> PyResult<usize> {
        locked(py, &self.0, |layer| Ok(layer.staging_bytes()))
    }

    /// Appends positions and fills `staging`, at least `staging_bytes` at a multiple of 16, with all
    /// that a device needs to attend. Returns where each section starts, counts, and bytes used.
    /// `like` as for `decode`.
    #[pyo3(signature = (q, k, v, dtype, staging, like=None))]
    fn stage<'py>(
        &self,
        py: Python<'py>,
        q: Any<'_, 'py>,
        k: Any<'_, 'py>,
        v: Any<'_, 'py>,
        dtype: &str,
        staging: Bytes<'_, 'py>,
        like: Option<&Bound<'py, PyChoices>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let [q, k, v] = [
            Array::new(q, dtype)?,
            Array::new(k, dtype)?,
            Array::new(v, dtype)?,
        ];
        let (q, k, v) = (q.heads()?, k.heads()?, v.heads()?);
        let mut staging = staging.try_readwrite()?;
        let staging = staging.as_slice_mut()?;
        let like = like.map(|choices| &choices.get().0);
        let long = k.first().is_some_and(|head| head.len > FEW);
        let staged = interruptible(py, &self.0, long, |layer, cancelled| {
            layer.stage(&q, &k, &v, like, staging, cancelled)
        })?;
        let layout = staged.layout.expect("stage has one");
        let sections = [
            ("attended", layout.attended.start),
            ("tail_max", layout.tail_max.start),
            ("tail_sum", layout.tail_sum.start),
            ("tail_values", layout.tail_values.start),
            ("rows", layout.rows),
            ("targets", layout.targets(staged.misses).start),
            ("hits", staged.hits),
            ("misses", staged.misses),
            ("bytes", layout.bytes(staged.misses)),
        ];
        let dict = PyDict::new(py);
        for (name, value) in sections {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    /// What `stage` wrote last did not arrive: no token is on the device any more.
    fn abandon_stage(&self, py: Python<'_>) -> PyResult<()> {
        locked(py, &self.0, |layer| {
            layer.abandon_stage();
            Ok(())
        })
    }

    /// Tokens `first` to `first + count` of each head, in the order in which they are stored.
    fn history(
        &self,
        py: Python<'_>,
        first: usize,
        count: usize,
        keys: Bytes<'_, '_>,
        values: Bytes<'_, '_>,
    ) -> PyResult<()> {
        let (mut keys, mut values) = (keys.try_readwrite()?, values.try_readwrite()?);
        let (keys, values) = (keys.as_slice_mut()?, values.as_slice_mut()?);
        locked(py, &self.0, |layer| {
            layer.history(first, count, keys, values)
        })
    }

    fn crop(&self, py: Python<'_>, n: usize) -> PyResult<()> {
        locked(py, &self.0, |layer| layer.crop(n))
    }

    /// An independent layer with the same tokens.
    fn fork(&self, py: Python<'_>) -> PyResult<Self> {
        let fork = locked(py, &self.0, |layer| Ok(layer.fork()))?;
        Ok(Self(Mutex::new(fork)))
    }

    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        locked(py, &self.0, |layer| {
            layer.reset();
            Ok(())
        })
    }

    /// Writes all keys and values in order of position, [kv_heads, seq_len, head_dim] each.
    fn gather(
        &self,
        py: Python<'_>,
        dtype: &str,
        keys: Any<'_, '_>,
        values: Any<'_, '_>,
    ) -> PyResult<()> {
        let [mut keys, mut values] = [Output::new(keys, dtype)?, Output::new(values, dtype)?];
        let (keys, values) = (keys.elements()?, values.elements()?);
        locked(py, &self.0, |layer| layer.gather(keys, values))
    }

    #[getter]
    fn seq_len(&self, py: Python<'_>) -> PyResult<usize> {
        locked(py, &self.0, |layer| Ok(layer.seq_len()))
    }

    #[getter]
    fn dtype(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        locked(py, &self.0, |layer| Ok(layer.dtype().map(Dtype::name)))
    }

    /// What the last `decode` or `stage` attended to exactly, for other layers to do like it.
    fn choices(&self, py: Python<'_>) -> PyResult<PyChoices> {
        locked(py, &self.0, |layer| Ok(PyChoices(layer.choices())))
    }

    /// Positions attended exactly by the last step, of each KV head.
    fn selected(&self, py: Python<'_>) -> PyResult<Vec<Vec<u32>>> {
        locked(py, &self.0, |layer| Ok(layer.selected()))
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        locked(py, &self.0, |layer| layer.check())
    }

    /// The first tree of one KV head as arrays, for measurement; None where there is none. "levels" goes
    /// from the leaves up, "ids" holds the positions of the tokens leaf by leaf.
    fn nodes<'py>(&self, py: Python<'py>, head: usize) -> PyResult<Option<Bound<'py, PyDict>>> {
        let copied = locked(py, &self.0, |layer| {
            let head = layer.heads().get(head);
            let tree = head.and_then(|head| head.forest().trees().first());
            Ok(tree.map(|tree| {
                let pages = tree.leaves().pages.iter();
                let ids: Vec<u32> = pages.flat_map(|&p| tree.pages.ids(p)).copied().collect();
                let levels: Vec<_> = tree.levels.iter().map(level_arrays).collect();
                (tree.transform.mean().to_vec(), ids, levels)
            }))
        })?;
        let Some((mean, ids, levels)) = copied else {
            return Ok(None);
        };
        let levels = levels.into_iter().map(|(scalars, keys, values)| {
            let level = PyDict::new(py);
            let column = |of: fn(&Scalars) -> f32| -> Vec<f32> { scalars.iter().map(of).collect() };
            let number = |of: fn(&Scalars) -> u32| -> Vec<u32> { scalars.iter().map(of).collect() };
            level.set_item("parent", number(|s| s.parent).into_pyarray(py))?;
            level.set_item("count", number(|s| s.count).into_pyarray(py))?;
            level.set_item("key_radius", column(|s| s.key_radius).into_pyarray(py))?;
            level.set_item("value_spread", column(|s| s.value_spread).into_pyarray(py))?;
            level.set_item("keys", keys.into_pyarray(py))?;
            level.set_item("values", values.into_pyarray(py))?;
            Ok(level)
        });
        let nodes = PyDict::new(py);
        nodes.set_item("levels", levels.collect::<PyResult<Vec<_>>>()?)?;
        nodes.set_item("mean", mean.into_pyarray(py))?;
        nodes.set_item("ids", ids.into_pyarray(py))?;
        Ok(Some(nodes))
    }

    /// The fields of `icecache.LayerStats`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = PyDict::new(py);
        let (counts, nodes, means, times) = locked(py, &self.0, |layer| {
            let heads = layer.heads();
            let trees = || heads.iter().flat_map(|head| head.forest().trees());
            let (kv_bytes, all, shared) = layer.bytes();
            let staged = layer.staged();
            let (last, all_staged) = staged.map_or_else(Default::default, |(l, a)| (l.clone(), a));
            let counts = [
                ("seq_len", layer.seq_len()),
                (
                    "sink_tokens",
                    heads.first().map_or(0, |head| head.sink_len()),
                ),
                (
                    "window_tokens",
                    heads.first().map_or(0, |head| head.window_len()),
                ),
                (
                    "tree_tokens",
                    heads.first().map_or(0, |head| head.forest().len()),
                ),
                ("pages", trees().map(|tree| tree.leaves().len()).sum()),
                ("kv_bytes", kv_bytes),
                ("index_bytes", all - kv_bytes),
                ("shared_bytes", shared),
                ("steps", layer.steps()),
                ("slots", layer.staged().map_or(0, |_| layer.device_slots())),
                ("slot_hits", all_staged.hits),
                ("slot_misses", all_staged.misses),
                ("slot_evictions", all_staged.evictions),
                ("last_slot_hits", last.hits),
                ("last_slot_misses", last.misses),
                ("last_row_bytes", last.row_bytes),
            ];
            let depth = trees().map(|tree| tree.levels.len()).max().unwrap_or(0);
            let nodes: Vec<usize> = (0..depth)
                .map(|d| {
                    trees()
                        .filter_map(|tree| tree.levels.get(d))
                        .map(|l| l.len())
                        .sum()
                })
                .collect();
            let tokens: usize = trees().map(|tree| tree.len).sum();
            let pages: usize = trees().map(|tree| tree.leaves().len()).sum();
            let count = heads.len().max(1) as f64;
            let mean = |what: &dyn Fn(crate::head::Step) -> f64| {
                layer.last_steps().map(what).fold(0.0, |a, x| a + x) / count
            };
            let means = [
                ("mean_page_fill", tokens as f64 / pages.max(1) as f64),
                (
                    "overhead",
                    if kv_bytes == 0 {
                        0.0
                    } else {
                        (all - kv_bytes) as f64 / kv_bytes as f64
                    },
                ),
                ("tokens_exact", mean(&|step| step.tokens_exact as f64)),
                ("key_rows_read", mean(&|step| step.key_rows as f64)),
                ("value_rows_read", mean(&|step| step.value_rows as f64)),
                ("mass_exact", mean(&|step| f64::from(step.mass_exact))),
                (
                    "error_estimate",
                    mean(&|step| f64::from(step.error_estimate)),
                ),
            ];
            let total = |part: fn(&Times) -> f32| {
                let seconds = layer.last_steps().map(|step| f64::from(part(&step.times)));
                1e3 * seconds.sum::<f64>()
            };
            let times = [
                ("search_ms", total(|t| t.search)),
                ("select_ms", total(|t| t.select)),
                ("attend_ms", total(|t| t.attend)),
                ("tail_ms", total(|t| t.tail)),
                ("pack_ms", 1e3 * f64::from(last.pack_time)),
            ];
            Ok((counts, nodes, means, times))
        })?;
        for (name, value) in counts {
            stats.set_item(name, value)?;
        }
        for (name, value) in means.into_iter().chain(times) {
            stats.set_item(name, value)?;
        }
        stats.set_item("nodes_per_level", pyo3::types::PyTuple::new(py, nodes)?)?;
        Ok(stats)
    }
}

/// Scalars, mean keys and mean values of a level, as f32.
fn level_arrays(level: &Level) -> (Vec<Scalars>, Vec<f32>, Vec<f32>) {
    let all = |rows: &RowStore| {
        let mut flat = vec![0.0; rows.len() * rows.dim()];
        for (i, row) in flat.chunks_exact_mut(rows.dim()).enumerate() {
            to_f32(rows.row(i), row);
        }
        flat
    };
    (level.scalars.clone(), all(&level.keys), all(&level.values))
}

fn options(config: Any<'_, '_>) -> PyResult<Options> {
    let count = |name: &str| -> PyResult<usize> { config.getattr(name)?.extract() };
    let text = |name: &str| -> PyResult<String> { config.getattr(name)?.extract() };
    let page_size = count("page_size")?;
    let page_capacity: Option<usize> = config.getattr("page_capacity")?.extract()?;
    let num_threads: Option<usize> = config.getattr("num_threads")?.extract()?;
    Ok(Options {
        token_budget: count("token_budget")?,
        sink_tokens: count("sink_tokens")?,
        window_tokens: count("window_tokens")?,
        candidate_factor: config.getattr("candidate_factor")?.extract()?,
        open_fraction: config.getattr("open_fraction")?.extract()?,
        field_of_view: count("field_of_view")?,
        selection: match text("selection")?.as_str() {
            "pages" => Selection::Pages,
            _ => Selection::Tokens,
        },
        tail: match text("tail")?.as_str() {
            "drop" => Tail::Drop,
            _ => Tail::Summary,
        },
        dense_below: count("dense_below")?,
        device_tokens: config.getattr("device_tokens")?.extract()?,
        num_threads: num_threads.unwrap_or(0),
        tree: TreeOptions {
            page_size,
            page_capacity: page_capacity.unwrap_or(2 * page_size),
            fanout: count("fanout")?,
            refine_passes: count("refine_passes")?,
            summary_dtype: super::arrays::dtype_named(&text("summary_dtype")?)?,
            seed: config.getattr("seed")?.extract()?,
            ..TreeOptions::default()
        },
    })
}
