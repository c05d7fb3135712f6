/**
 * What the page can make, by the modality that GET /v1/models says. A kind is a module that exports
 *
 *   words          {one, many, placeholder, avoided, empty, kept}: what the page says
 *   told           names of fields that the facts of its results tell in other words
 *   sizes          [title, [[width, height], ...]] to choose from
 *   takes          (field, model): whether requests have the field
 *   inputs         (model): the files that requests may bring, {name, title, accept, most, needed, hint}
 *   shape          (fields): {ratio: width / height, width: in pixels or null} of what will be there
 *   make           (request, {model, signal}): yields events until all is there
 *   view, thumbnail  (result): an element
 *   curl, python   (request, url, hasKey): the request as a command
 *
 * and, where results outlive the page, `kept`: see video.js. Events are {kind: "progress", words, phase, value, max},
 * {kind: "preview", index, blob} and {kind: "result", ...}, which makeResult in gallery.js describes.
 */

import * as audio from "./audio.js";
import * as image from "./image.js";
import * as video from "./video.js";

export const KINDS = { audio, image, video };
